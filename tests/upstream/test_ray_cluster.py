"""Starting a node of a Ray cluster and waiting for the others, on a stand-in for Ray and for the clock."""

import copy
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.upstream import ray_cluster
from coca_mindspeed.upstream.ray_cluster import wait_for_cluster
from tests.launch.scripts_for_tests import ended


class Ray:
    """Refuses the first ``refusals`` attempts to join; from then on it has as many nodes as ``growing`` says."""

    def __init__(self, refusals: int, growing: list[int]) -> None:
        self.refusals, self.growing, self.joined = refusals, growing, False

    def is_initialized(self) -> bool:
        return self.joined

    def init(self, **arguments: Any) -> None:
        assert arguments["address"] == "auto", "it must never start a cluster of its own"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("Could not find any running Ray instance")
        self.joined = True

    def shutdown(self) -> None:
        self.joined = False

    def count(self) -> int:
        assert self.joined
        return self.growing.pop(0) if len(self.growing) > 1 else self.growing[0]

    def nodes(self) -> list[dict[str, Any]]:
        alive = self.count()
        return [{"Alive": index < alive} for index in range(4)]

    def cluster_resources(self) -> dict[str, float]:
        return {"NPU": 8.0 * self.count()}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes in ``sleep`` alone."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(ray_cluster, "time", clock)


def wait(monkeypatch, ray: Ray, wanted: int, timeout: float, resource: str | None = "NPU") -> float:
    monkeypatch.setitem(sys.modules, "ray", ray)
    begin, handler = ray_cluster.time.monotonic(), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        wait_for_cluster(wanted, resource, timeout)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # Ray sets its own
    finally:
        signal.signal(signal.SIGTERM, handler)
    return ray_cluster.time.monotonic() - begin


@pytest.mark.parametrize(("ray", "seconds"), [(Ray(0, [2]), 0), (Ray(0, [1, 1, 2]), 4), (Ray(2, [1, 2]), 6)])
@pytest.mark.parametrize(("wanted", "resource", "what"), [(2, None, "nodes"), (16, "NPU", "NPUs")])
def test_it_is_waited_for_until_it_is_whole(monkeypatch, capsys, ray, seconds, wanted, resource, what):
    """Nodes, or a resource; a training can connect afterwards."""
    ray = copy.deepcopy(ray)
    assert wait(monkeypatch, ray, wanted, 60, resource) == seconds
    assert not ray.joined
    assert capsys.readouterr().out.splitlines()[-1] == f"the Ray cluster has {wanted} {what}"


def test_a_head_that_has_ended_is_not_waited_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Ray(100, [0]))
    codes = iter([None, None, 7])
    with pytest.raises(TrainingError, match="code 7"):
        wait_for_cluster(2, None, 600, lambda: next(codes))
    assert ray_cluster.time.monotonic() < 10


@pytest.mark.parametrize(("refusals", "found"), [(0, 8), (100, 0)])
def test_the_wait_has_a_limit_and_says_how_far_it_came(monkeypatch, refusals, found):
    ray = Ray(refusals, [1])
    with pytest.raises(TrainingError, match=f"{found} of 16 NPUs .*10 seconds"):
        wait(monkeypatch, ray, 16, 10)
    assert not ray.joined


def test_a_long_wait_is_reported_twice_a_minute(monkeypatch, capsys):
    wait(monkeypatch, Ray(0, [1] * 50 + [2]), 16, 600)
    first, *others, _ = capsys.readouterr().out.splitlines()
    assert "16 NPUs" in first
    assert "600 seconds" in first
    assert others == [f"8 of 16 NPUs after {seconds} seconds" for seconds in (30, 60, 90)]


@pytest.fixture
def ray(monkeypatch):
    """Ray's modules that are used, whose node is there at the third question; ``calls`` are those of the others."""
    calls: list[Any] = []
    names = ("ray", "ray._private.services", "ray._private.utils", "ray.scripts.scripts")
    modules = {name: ModuleType(name) for name in names}
    services: Any = modules["ray._private.services"]
    asked = iter([RuntimeError("not found"), RuntimeError("not found"), {"NodeID": "n"}])

    def get_node(_address: str, _name: str) -> Any:
        if isinstance(found := next(asked), RuntimeError):
            raise found
        return found

    services.get_node = get_node
    modules["ray._private.utils"].set_sigterm_handler = None  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_cluster, "end_with_parent", lambda: None)
    services.wait_for_node = lambda _address, _socket, timeout=30: calls.append(timeout)
    modules["ray.scripts.scripts"].cli = calls.append  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return services, calls


def test_both_waits_take_longer_and_are_reported(ray, capsys):
    services, calls = ray
    ray_cluster.wait_for_slow_nodes(600)
    services.wait_for_node("gcs", "socket")
    assert calls == [600]
    assert services.get_node("gcs", "n") == {"NodeID": "n"}
    assert capsys.readouterr().out.count("seconds more") == 2


def test_the_wait_for_a_node_has_a_limit(ray):
    services, _ = ray
    ray_cluster.wait_for_slow_nodes(0)
    with pytest.raises(RuntimeError, match="not found"):
        services.get_node("gcs", "n")


def test_the_arguments_reach_ray_start(ray):
    ray_cluster.main(["start", "600", "--block", "--head"])
    assert ray[1] == [["start", "--block", "--head"]]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_end_of_ray(ray, monkeypatch, first):
    """Ray's own handler would wait for the lock that it holds."""
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ending}
    received = []

    def end_of_ray(number, _frame):
        received.append(number)
        for again in ending:
            signal.raise_signal(again)

    utils: Any = sys.modules["ray._private.utils"]
    utils.set_sigterm_handler = lambda handler: signal.signal(signal.SIGTERM, handler)
    start = sys.modules["ray.scripts.scripts"]
    monkeypatch.setattr(start, "cli", lambda _: utils.set_sigterm_handler(end_of_ray) or signal.raise_signal(first))
    try:
        ray_cluster.main(["start", "600", "--block", "--head"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == [first]


def test_a_node_ends_with_the_process_that_started_it():
    """Also if that is killed, and cannot end it."""
    node = "import os, time; from coca_mindspeed.upstream.ray_cluster import end_with_parent; end_with_parent()"
    node += "; print(os.getpid(), flush=True); time.sleep(300)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {node!r}])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    assert ended(pid)
