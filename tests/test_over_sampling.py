"""Over-sampling of whole groups, against iterations computed by hand."""

import pytest

from benchmarks.over_sampling import Group, iterate
from benchmarks.rollout_simulator import Costs, Engine, Request

COSTS = Costs(decode=((1, 1.0),), prefill=1.0, prefill_token=0.0)
ENGINE = Engine(max_num_seqs=4, kv_tokens=1000, block_size=1, max_num_batched_tokens=1000)


def group(*lengths: int, carried: int = 0) -> Group:
    return Group([Request(10, length) for length in lengths], carried)


def test_an_unfinished_group_is_carried_over_with_its_tokens():
    short, long = group(2, 4), group(3, 9)
    run = iterate([short, long], 1, 1, ENGINE, COSTS, staleness=1)
    assert (run.seconds, run.trained, run.carried, run.dropped) == (4.0, [short], [long], [])
    assert [response.generated for response in long.responses] == [3, 4]
    assert long.carried == 1
    # 5 tokens are missing, the first by the prefill; a new group ends before
    run = iterate([long, group(1, 1)], 1, 1, ENGINE, COSTS, staleness=1)
    assert (run.seconds, run.trained) == (5.0, [long])


@pytest.mark.parametrize(("drop", "trained", "seconds"), [(False, 0, 9.0), (True, 1, 2.0)])
def test_a_group_beyond_the_staleness_is_waited_for_or_dropped(drop, trained, seconds):
    groups = [group(9, 9, carried=1), group(2, 2)]
    run = iterate(groups, 1, 1, ENGINE, COSTS, staleness=1, drop=drop)
    assert (run.seconds, run.trained) == (seconds, [groups[trained]])
    assert run.dropped == ([groups[0]] if drop else [])
    assert run.carried == ([] if drop else [groups[1]])


def test_a_whole_group_that_is_not_needed_waits_for_the_next_iteration():
    groups = [group(2, 2), group(2, 2)]
    run = iterate(groups, 1, 2, ENGINE, COSTS, staleness=1)
    assert (run.seconds, len(run.carried), run.carried[0].whole) == (2.0, 1, True)
    assert iterate([*run.carried, group(5, 5)], 1, 2, ENGINE, COSTS, staleness=1).seconds == 0.0


def test_without_over_sampling_every_group_is_waited_for():
    groups = [group(2, 7), group(3, 3), group(5, 1)]
    run = iterate(groups, 3, 2, ENGINE, COSTS, staleness=1)
    assert (run.seconds, run.trained, run.carried) == (7.0, groups, [])
