"""The rollout simulator against cases computed by hand, what ``make bench-check`` calls worse, and a run's hooks."""

import math
import platform
import random
import statistics

import pytest

from benchmarks import check as bench
from benchmarks import mindspeed_own_grpo
from benchmarks.check import BASELINES, FIGURES, Comparison, Figure, check, compare, read_baselines
from benchmarks.machine import processor
from benchmarks.rollout_simulator import (
    Costs,
    Engine,
    LogNormal,
    Request,
    read_lengths,
    simulate_engine,
)
from coca_mindspeed.upstream.manifest import load_manifests

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


@pytest.mark.parametrize("line", ["", "0", "3 0", "long", "1.5"])
def test_a_line_of_no_length_is_named(tmp_path, line):
    path = tmp_path / "lengths"
    path.write_text(f"7\n{line}\n8\n")
    with pytest.raises(ValueError, match="lengths:2"):
        read_lengths(path)


SPEED, SIZE = "times as fast", "MiB"


@pytest.mark.parametrize(
    ("kind", "before", "now", "problem"),
    [
        (SPEED, 2.29, 2.00, None),
        (SPEED, 2.32, 2.00, "16% slower"),
        (SPEED, 2.0, 1.0, "100% slower"),
        (SPEED, 1.0, 9.0, None),
        (SIZE, 1000.0, 1049.0, None),
        (SIZE, 1000.0, 1061.0, "6% larger"),
        (SIZE, 1000.0, 100.0, None),
        (SPEED, None, 2.0, "has no baseline"),
        (SIZE, 1000.0, None, "is measured no more"),
    ],
)
def test_what_is_worse(kind, before, now, problem):
    assert Comparison("it", kind, before, now).problem == problem


@pytest.mark.parametrize(
    ("fast", "large", "baselines", "code"),
    [
        ([1.0, 1.9], [100.0], {"fast": 2.0, "large": 100.0}, 0),  # measured again, it is no worse
        ([1.9], [108.0, 107.0], {"fast": 2.0, "large": 100.0}, 1),
        ([1.9], [100.0], {"fast": 2.0, "old": 1.0}, 1),
    ],
)
def test_what_is_worse_once_is_measured_again(monkeypatch, fast, large, baselines, code):
    figures = {"fast": Figure(SPEED, lambda _: fast.pop(0)), "large": Figure(SIZE, lambda _: large.pop(0))}
    monkeypatch.setattr(bench, "FIGURES", figures)
    here = {"machine": {"processor": processor()}}
    assert check(baselines, here, lambda names: bench.measured(names, 1)) == code
    assert not fast + large


@pytest.mark.parametrize("content", [{}, {"machine": "another"}, {"machine": {"processor": "AMD EPYC"}}])
def test_baselines_of_another_processor_give_no_verdict(monkeypatch, capsys, content):
    monkeypatch.setattr(bench, "FIGURES", {"fast": Figure(SPEED, lambda _: 1.25)})
    monkeypatch.setattr(bench, "processor", lambda: "AMD EPYC (family 25, model 1)")
    assert check({"fast": 2.0}, content, lambda names: bench.measured(names, 1)) == 0
    assert "1.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("processor: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 1)"),
        ("model name\t: ARMv8\n", "ARMv8"),
        ("", None),
    ],
)
def test_the_processors_name_has_its_model(tmp_path, lines, name):
    (tmp_path / "cpuinfo").write_text(lines)
    assert processor(tmp_path / "cpuinfo") == (name or platform.processor() or platform.machine())


def test_the_committed_baselines_are_of_the_figures_that_are_measured():
    figures, content = read_baselines(BASELINES)
    assert list(figures) == list(FIGURES)
    assert {name: entry["kind"] for name, entry in content["figures"].items()} == {
        name: figure.kind for name, figure in FIGURES.items()
    }
    assert content["packages"]["torch"]
    compare(figures, figures, {})


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.release)
def test_mindspeed_rls_own_grpo_is_given_the_hosts_hooks_alone(manifest):
    kept = mindspeed_own_grpo.of_the_host(manifest)
    by_us = {hook.replacement for hook in kept.hooks if ".mindspeed_host." not in str(hook.replacement)}
    assert by_us == {
        "coca_mindspeed.mindspeed.stages.rollout_engine:count_rollouts",
        "coca_mindspeed.mindspeed.stages.actor_worker:hooked_actor",
    }
    hosts = [hook.target for hook in manifest.hooks if hook.platform == "host" or hook.rollout == "transformers"]
    assert len(hosts) >= 6
    assert [hook.target for hook in kept.hooks if ".mindspeed_host." in str(hook.replacement)] == hosts
