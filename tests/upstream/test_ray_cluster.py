"""Waiting for a Ray cluster, on a stand-in for Ray and for the clock."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.start import cluster
from coca_mindspeed.upstream.ray_cluster import wait_for_cluster
from coca_mindspeed.verl import nodes


class Ray:
    """Refuses the first ``refusals`` attempts to join; from then on it has as many nodes as ``growing`` says."""

    def __init__(self, refusals: int, growing: list[int]) -> None:
        self.refusals, self.growing, self.joined = refusals, growing, False

    def is_initialized(self) -> bool:
        return self.joined

    def init(self, **arguments: Any) -> None:
        assert arguments["address"] == "auto", "it must never start a cluster of its own"
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("Could not find any running Ray instance")
        self.joined = True

    def count(self) -> int:
        assert self.joined
        return self.growing.pop(0) if len(self.growing) > 1 else self.growing[0]

    def nodes(self) -> list[dict[str, Any]]:
        alive = self.count()
        return [{"Alive": index < alive, "Resources": {"NPU": 8.0, "CPU": 200.0}} for index in range(4)]

    def cluster_resources(self) -> dict[str, float]:
        return {"NPU": 8.0 * self.count()}


class Clock(SimpleNamespace):
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


def wait(ray: Ray, wanted: int, timeout: float) -> float:
    clock = Clock()
    wait_for_cluster(ray, wanted, "NPUs", ray.count, timeout, clock.sleep, clock.read)
    return clock.now


def test_it_is_waited_for_until_it_is_whole():
    assert wait(Ray(0, [16]), 16, 60) == 0
    assert wait(Ray(0, [8, 8, 16]), 16, 60) == 4
    assert wait(Ray(2, [8, 16]), 16, 60) == 6


@pytest.mark.parametrize(("refusals", "found"), [(0, 8), (100, 0)])
def test_the_wait_has_a_limit_and_says_how_far_it_came(refusals, found):
    with pytest.raises(TrainingError, match=f"has {found} of 16 NPUs after 10 seconds; look at the other nodes'"):
        wait(Ray(refusals, [8]), 16, 10)


def test_a_long_wait_is_reported_twice_a_minute(capsys):
    wait(Ray(0, [8] * 50 + [16]), 16, 600)
    first, *others = capsys.readouterr().out.splitlines()
    assert "16 NPUs" in first
    assert "600 seconds" in first
    assert others == [f"8 of 16 NPUs after {seconds} seconds" for seconds in (30, 60, 90)]


COMMANDS = [
    (nodes.main, ["2", "--timeout", "0"], "nodes"),
    (cluster.main, ["--npus", "16", "--cpus-per-npu", "8", "--other-cpus", "13", "--timeout", "0"], "NPUs"),
]


@pytest.mark.parametrize(("main", "arguments", "what"), COMMANDS)
def test_both_engines_commands_end_alike(main, arguments, what, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", Ray(0, [2]))
    assert main(arguments) == 0
    count = arguments[0] if what == "nodes" else 16
    assert capsys.readouterr().out.splitlines()[-1] == f"the Ray cluster has {count} {what}"
    for ray in (Ray(0, [1]), Ray(1, [1])):
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert main(arguments) == TrainingError.exit_code
        assert f"{what} after 0 seconds; look at the other nodes' output" in capsys.readouterr().err
