"""A longer wait for a Ray node, on a stand-in for Ray."""

import sys
from types import ModuleType
from typing import Any

import pytest

from coca_mindspeed.upstream import ray_start


@pytest.fixture
def ray(monkeypatch):
    """Ray's modules that are used, whose node is there at the third question; ``calls`` are those of the others."""
    calls: list[Any] = []
    modules = {name: ModuleType(name) for name in ("ray", "ray._private.services", "ray.scripts.scripts")}
    services: Any = modules["ray._private.services"]
    asked = iter([RuntimeError("not found"), RuntimeError("not found"), {"NodeID": "n"}])

    def get_node(_address: str, _name: str) -> Any:
        if isinstance(found := next(asked), RuntimeError):
            raise found
        return found

    services.get_node = get_node
    services.wait_for_node = lambda _address, _socket, timeout=30: calls.append(timeout)
    modules["ray.scripts.scripts"].cli = calls.append  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_start.time, "sleep", lambda _seconds: None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return services, calls


def test_both_waits_take_longer_and_are_reported(ray, capsys):
    services, calls = ray
    ray_start.wait_for_slow_nodes(600)
    services.wait_for_node("gcs", "socket")
    assert calls == [600]
    assert services.get_node("gcs", "n") == {"NodeID": "n"}
    assert capsys.readouterr().out.count("up to 600 seconds") == 2


def test_the_wait_has_a_limit(ray):
    services, _ = ray
    ray_start.wait_for_slow_nodes(0)
    with pytest.raises(RuntimeError, match="not found"):
        services.get_node("gcs", "n")


def test_the_arguments_reach_ray_start(ray, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ray_start", "600", "--block", "--head"])
    ray_start.main()
    assert ray[1] == [["start", "--block", "--head"]]
