"""For every test: no limit in wall time on hypothesis' examples, and Ctrl-C reaches the processes that tests start.

Slow tests come first, so that no process of pytest-xdist is left alone with one at the end.  Nightly and published
tests run only where ``-m`` names one of these markers; the summary counts those left out, each folder's seconds, and
the skipped tests by reason.
"""

import gc
import importlib.util
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

LEFT_OUT = ("nightly", "published")
left_out = pytest.StashKey[dict[str, int]]()

# Before torch is loaded, as the commands do: threads that spin take the cores of the other processes of pytest-xdist.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"

# A pass over all of torch's, sympy's and the tests' objects takes an eighth of the processor time of the suite.
gc.set_threshold(50_000, 20, 20)

# A shell starts what it runs in the background with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The environments of tests/integration do without it.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_collection_modifyitems(config, items):
    config.stash[left_out] = {}
    if not any(marker in config.option.markexpr for marker in LEFT_OUT):
        for marker in LEFT_OUT:
            deselected = [item for item in items if item.get_closest_marker(marker)]
            config.stash[left_out][marker] = len(deselected)
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if importlib.util.find_spec("pytest_rerunfailures") is not None:
        for item in items:
            if item.get_closest_marker("timing"):
                item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist: it collects, the controller reports
        session.config.workeroutput["left_out"] = session.config.stash.get(left_out, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[left_out] = getattr(node, "workeroutput", {}).get("left_out", {})


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # the last lines
def pytest_terminal_summary(terminalreporter, config):
    yield
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds of each folder, without imports")
        for folder, total in seconds.most_common():
            terminalreporter.write_line(f"{total:8.1f}  {folder}")
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)  # (file, line, reason)
    )
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")
    for marker, number in config.stash.get(left_out, {}).items():
        if number:
            terminalreporter.write_line(f"{number} {marker} tests left out: make test-{marker}")


@pytest.fixture
def handlers():
    """The signal handlers of the test runner, which are put back whatever a test leaves."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_pictures(monkeypatch):
    """Reports of runs without their pictures, which take seconds."""
    monkeypatch.setattr("coca_mindspeed.local.report.draw_plots", lambda *_: ("", {}))


_HAS_VERL = importlib.util.find_spec("verl") is not None  # before a test imports the stub


@pytest.fixture
def verls_keys(monkeypatch):
    """Where verl is not installed: the keys of its configuration that we read, also for processes that are started."""
    if not _HAS_VERL:
        stub = str(Path(__file__).parent / "support" / "verl_stub")
        monkeypatch.syspath_prepend(stub)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [stub, os.environ.get("PYTHONPATH")])))
