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
    simulate_rollout,
)
from benchmarks.rollout_validation import run_stepwise

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


def test_tail_starts_after_nine_tenths_of_the_responses() -> None:
    costs = Costs(decode=((1, 1.0),), prefill=0.0, prefill_token=0.0)
    rollout = simulate_rollout([[Request(1, 11) for _ in range(9)] + [Request(1, 41)]], engine(10), costs)
    assert rollout.tail_share == pytest.approx(0.75)
    slowest = simulate_rollout([[Request(10, 3)], [Request(10, 9)]], engine(1), COSTS)
    assert ([run.seconds for run in slowest.runs], slowest.seconds) == ([3.5, 9.5], 9.5)


@pytest.mark.parametrize(
    ("until", "generated", "seconds"),
    [(3.4, [0, 0], 0.0), (3.5, [1, 1], 3.5), (6.4, [2, 2], 5.0), (6.5, [3, 3], 6.5), (7.6, [3, 4], 7.5)],
)
def test_a_rollout_stops_after_the_last_whole_step(until: float, generated: list[int], seconds: float) -> None:
    requests = [Request(10, 3), Request(20, 5)]
    run = simulate_engine(requests, engine(2), COSTS, until)
    assert [request.generated for request in requests] == generated
    assert run.seconds == pytest.approx(seconds)
    rest = [request for request in requests if request.generated < request.length]
    assert simulate_engine(rest, engine(2), COSTS).generated == 8 - sum(generated)


@pytest.mark.parametrize("request_", [Request(10, 92), Request(60, 42)])
def test_a_request_larger_than_the_kv_cache_is_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        simulate_engine([request_], engine(1, kv_tokens=100), COSTS)
    assert simulate_engine([request_], engine(1, kv_tokens=101), COSTS).generated == request_.length


@pytest.mark.parametrize("seed", range(4))
def test_jumps_over_equal_steps_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    costs = Costs(((1, 1.0), (3, 2.0), (8, 2.5)), cached_token=0.01, prefill=0.5, prefill_token=0.1)
    own = engine(rng.randint(1, 8), rng.randint(60, 200), rng.choice([1, 4, 16]))
    shapes = [(rng.randint(1, 12), rng.randint(1, 30)) for _ in range(30)]
    stepwise = [Request(*shape) for shape in shapes]
    seconds, running, tokens = 0.0, list[int](), 0

    def prefill(admitted: list[int]) -> None:
        nonlocal seconds, tokens
        tokens += sum(stepwise[i].context for i in admitted)
        seconds += costs.prefill + costs.prefill_token * sum(stepwise[i].context for i in admitted)
        running.extend(admitted)

    def decode() -> None:
        nonlocal seconds
        assert sum(own.blocks(stepwise[i].context) for i in running) <= own.most_blocks
        assert 1 <= len(running) <= own.max_num_seqs
        seconds += costs.steps([stepwise[i].context for i in running], 1)

    preemptions = run_stepwise(stepwise, own, prefill, decode, running.remove)
    run = simulate_engine([Request(*shape) for shape in shapes], own, costs)
    assert (run.preemptions, run.prefilled) == (preemptions, tokens)
    assert run.seconds == pytest.approx(seconds)
    assert run.generated == sum(length for _, length in shapes)
    assert max(run.finished) == run.seconds


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
