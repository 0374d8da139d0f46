"""The rollout simulator against cases computed by hand, against a scheduler that goes step by step, and its lengths."""

import math
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.rollout_simulator import (
    Costs,
    Engine,
    LogNormal,
    Request,
    read_lengths,
    simulate_engine,
)

COSTS = Costs(decode=((1, 1.0), (2, 1.5)), prefill=0.5, prefill_token=0.1)


def engine(slots: int, kv_tokens: int = 1000, block_size: int = 1) -> Engine:
    return Engine(max_num_seqs=slots, kv_tokens=kv_tokens, block_size=block_size, max_num_batched_tokens=1000)


@pytest.mark.parametrize(
    ("slots", "kv_tokens", "requests", "finished", "preemptions", "prefilled", "sequence_seconds"),
    [
        # both prefilled in 0.5 + 3.0 s; 2 steps of two in 3.0 s; 2 steps of one
        (2, 1000, [(10, 3), (20, 5)], [6.5, 8.5], 0, 30, 8.0),
        # one after the other: 1.5 + 2.0 s, 2.5 + 4.0 s
        (1, 1000, [(10, 3), (20, 5)], [3.5, 10.0], 0, 30, 6.0),
        # 1.1 s; 1 step of two; the next needs 5 + 5 tokens: the second is preempted; 2.0 s; prefill of 5 tokens; 1.0 s
        (2, 9, [(3, 4), (3, 4)], [4.6, 6.6], 1, 11, 6.0),
        # the second does not fit beside the first: 0.8 + 3.0 s, then 0.8 + 3.0 s
        (2, 6, [(3, 4), (4, 3)], [3.8, 6.7], 0, 7, 5.0),
        # a prefill yields the only token
        (2, 1000, [(10, 1)], [1.5], 0, 10, 0.0),
    ],
)
def test_rollouts_computed_by_hand(slots, kv_tokens, requests, finished, preemptions, prefilled, sequence_seconds):
    run = simulate_engine([Request(*request) for request in requests], engine(slots, kv_tokens), COSTS)
    assert run.finished == pytest.approx(finished)
    assert run.seconds == pytest.approx(max(finished))
    assert (run.preemptions, run.prefilled) == (preemptions, prefilled)
    assert run.generated == sum(length for _, length in requests)
    assert run.sequence_seconds == pytest.approx(sequence_seconds)


@pytest.mark.parametrize("request_", [Request(10, 92), Request(60, 42)])
def test_a_request_larger_than_the_kv_cache_is_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        simulate_engine([request_], engine(1, kv_tokens=100), COSTS)
    assert simulate_engine([request_], engine(1, kv_tokens=101), COSTS).generated == request_.length


def test_log_normal_lengths_have_the_mean_the_cut_and_the_correlation() -> None:
    groups = LogNormal(mean=750, sigma=0.8, between=0.5, longest=4096).draw(random.Random(0), 4000, 16)
    lengths = [length for group in groups for length in group]
    assert statistics.mean(lengths) == pytest.approx(750, rel=0.03)
    assert (min(lengths) >= 1, max(lengths)) == (True, 4096)
    first, second = ([math.log(group[i]) for group in groups] for i in (0, 1))
    assert statistics.correlation(first, second) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("line", ["", "0", "-1", "3 0", "1 2 3", "long", "1.5"])
def test_a_line_of_no_length_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(f"7\n{line}\n8\n")
    with pytest.raises(ValueError, match="lengths:2"):
        read_lengths(path)
