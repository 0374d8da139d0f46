"""What ``make bench-check`` calls worse, and the hooks of MindSpeed-RL's own GRPO."""

import pytest

from benchmarks import check as bench
from benchmarks import mindspeed_own_grpo
from benchmarks.check import BASELINES, FIGURES, Comparison, Figure, check, compare, read_baselines
from coca_mindspeed.upstream.manifest import load_manifests

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
    assert check(baselines, {"machine": "another"}, lambda names: bench.measured(names, 1)) == code
    assert not fast + large


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
