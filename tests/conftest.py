"""For every test: no limit in wall time on hypothesis' examples, and Ctrl-C reaches the processes that tests start.

Slow tests come first, so that no process of pytest-xdist is left alone with one at the end.  Nightly and published
tests run only where ``-m`` names one of these markers.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

LEFT_OUT = ("nightly", "published")

# A shell starts what it runs in the background with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The environments of tests/integration do without it.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_collection_modifyitems(config, items):
    if not any(marker in config.option.markexpr for marker in LEFT_OUT):
        left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in LEFT_OUT)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(item.get_closest_marker(marker) for marker in LEFT_OUT)]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if importlib.util.find_spec("pytest_rerunfailures") is not None:
        for item in items:
            if item.get_closest_marker("timing"):
                item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.fixture
def no_pictures(monkeypatch):
    """Reports of runs without their pictures, which take seconds."""
    monkeypatch.setattr("coca_mindspeed.local.report._plots", lambda *_: ("", {}))


@pytest.fixture
def verls_keys(monkeypatch):
    """Where verl is not installed: the keys of its configuration that we read, also for processes that are started."""
    if importlib.util.find_spec("verl") is None:
        stub = str(Path(__file__).parent / "support" / "verl_stub")
        monkeypatch.syspath_prepend(stub)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [stub, os.environ.get("PYTHONPATH")])))
