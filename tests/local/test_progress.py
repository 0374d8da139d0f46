"""What progress bars say, at every width of a terminal and in a log file."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from coca_mindspeed.local.progress import TrainingProgress
from coca_mindspeed.local.report import left_out
from coca_mindspeed.utils import progress as progress_module
from coca_mindspeed.utils.progress import StepProgress


def metrics(accuracy: float, ece: float = 0.25) -> dict[str, float]:
    return {"reward/confidence": -0.125, "rollout/accuracy": accuracy, "rollout/ece": ece}


TIMING = {"tokens_per_second/rollout": 1234.4}


def as_terminal(monkeypatch, width: int) -> io.StringIO:
    file = io.StringIO()

    def console(**_):
        return Console(file=file, force_terminal=True, width=width, color_system=None, legacy_windows=False)

    monkeypatch.setattr(progress_module, "Console", console)
    return file


@pytest.mark.parametrize("width", [30, 40, 50, 80, 120, 200])
def test_the_numbers_survive_narrow_terminals(monkeypatch, width):
    file = as_terminal(monkeypatch, width)
    with TrainingProgress(300, enabled=True) as progress:
        for step in range(1, 13):
            progress.advance(step, metrics(0.5), TIMING)
    last = re.split(r"[\r\n]|\x1b\[\??\w+", file.getvalue().rstrip())
    last = [text for text in last if text.strip()][-1]
    assert "12/300" in last
    assert "accuracy 0.500" in last
    assert len(last) <= width
    if width >= 50:
        assert "ECE 0.25" in last
    if width >= 120:
        assert "confidence reward -0.125" in last


def test_a_log_file_gets_a_line_every_tenth_unwrapped(capsys):
    with StepProgress(100, enabled=True, title="checking") as progress:
        for step in range(0, 101, 7):
            progress.show(step, "x" * 300)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.endswith("x" * 300) for line in lines)
    assert [int(re.search(r" (\d+)/", line)[1]) // 10 for line in lines] == list(range(1, 10))


@pytest.fixture
def clock(monkeypatch):
    """The time that progress bars see; tests move it on."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_the_time_left_of_slow_steps_is_said(clock, capsys):
    """A step of two minutes: longer than what rich's own estimate remembers."""
    with StepProgress(10, enabled=True, done=2, title="answering") as progress:
        for step in range(3, 11):
            clock.now += 120.0
            progress.show(step, "text")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "answering 3/10  about 14 min left  text"
    assert lines[-2:] == ["answering 9/10  about 2 min left  text", "answering 10/10  text"]


def test_the_report_counts_answers_that_are_left_out():
    counts = {"before": {"ungradable": 0, "n": 40}, "after": {"ungradable": 1_033, "n": 7}}
    assert left_out(counts) == "1,033 of 1,040 answers after the training could not be graded and are left out.\n\n"
    assert left_out({"after": counts["before"]}) == ""
