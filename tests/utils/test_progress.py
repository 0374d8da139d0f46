"""Progress at every width of a terminal and in a log file, and how long it will still take."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from coca_mindspeed.utils import progress as progress_module
from coca_mindspeed.utils.console import duration
from coca_mindspeed.utils.progress import STEPS, Pace, StepProgress, TrainingProgress


def metrics(accuracy: float, ece: float = 0.25) -> dict[str, float]:
    return {"reward/confidence": -0.125, "rollout/accuracy": accuracy, "rollout/ece": ece}


@pytest.mark.parametrize("width", [30, 40, 50, 80, 120, 200])
def test_the_numbers_survive_narrow_terminals(monkeypatch, width):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    monkeypatch.setattr(progress_module, "Console", lambda **_: terminal)
    with TrainingProgress(300, enabled=True) as progress:
        for step in range(1, 13):
            progress.advance(step, metrics(0.5), {"tokens_per_second/rollout": 1234.4})
    last = re.split(r"[\r\n]|\x1b\[\??\w+", file.getvalue().rstrip())
    last = [text for text in last if text.strip()][-1]
    assert "12/300 accuracy 0.500" in last
    assert len(last) <= width
    assert ("ECE 0.250" in last) == (width >= 40)
    assert ("confidence reward -0.125" in last) == (width >= 120)


def test_a_metric_without_a_meaning_for_the_method_is_hidden(capsys):
    with TrainingProgress(2, enabled=True, hidden=("reward/confidence",)) as progress:
        progress.advance(2, metrics(0.5), {})
    printed = capsys.readouterr().err
    assert "confidence reward" not in printed
    assert "accuracy 0.500" in printed


@pytest.fixture
def clock(monkeypatch):
    """The time that progress bars see; tests move it on."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_a_log_file_gets_an_unwrapped_line_every_tenth_after_the_patience(clock, capsys):
    with StepProgress(100, enabled=True, title="checking", patience=20.0) as progress:
        for step in range(0, 101, 7):
            clock.now += 5.0
            progress.show(step, "x" * 300)
            progress.busy("waiting")
    lines = [line for line in capsys.readouterr().err.splitlines() if "waiting" not in line]
    assert all(line.endswith("x" * 300) for line in lines)
    assert [int(re.search(r" (\d+)/", line)[1]) // 10 for line in lines] == list(range(2, 10))


def test_the_time_left_of_slow_steps_is_said(clock, capsys):
    """A step of two minutes: longer than what rich's own estimate remembers."""
    with StepProgress(10, enabled=True, done=2, title="answering") as progress:
        for step in range(3, 11):
            clock.now += 120.0
            progress.show(step, "text")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "answering 3/10  about 14 min left  text"
    assert lines[-2:] == ["answering 9/10  about 2 min left  text", "answering 10/10  text"]


def row(step, evaluation=None, *, rollout=2.0):
    more = {} if evaluation is None else {"seconds/evaluation": evaluation}
    return {"step": step, "seconds/rollout": rollout, "seconds/grading": 0.5, "seconds/update": 1.5, **more}


def test_several_steps_told_as_one():
    pace = Pace(100)
    assert pace.left(0) is None
    pace.add(10, 5.0)
    pace.add(30, 35.0)
    assert pace.left(40) == 60.0
    assert pace.left(100) == 0.0


def test_evaluations_to_come_take_as_long_as_the_last_one():
    assert Pace(10, 0, [{"step": 1, "tokens_per_second/rollout": 3.0}]).left(1) is None
    pace = Pace(25, 10, [row(step) for step in range(1, 10)])
    assert pace.left(9) == 4.0 * 16  # none was made yet
    pace.add_training_step(row(10, 30.0))
    assert pace.left(10) == 4.0 * 15 + 30.0
    for step in range(11, 20):
        pace.add_training_step(row(step))
    pace.add_training_step(row(20, 50.0))
    assert pace.left(19) == 4.0 * 6 + 50.0
    assert pace.left(20) == 4.0 * 5


def test_steps_of_long_ago_do_not_count_nor_what_a_row_does_not_say():
    slow = [row(step, rollout=100.0) for step in range(1, 20)]
    fast = [row(step) for step in range(20, 20 + STEPS)]
    assert Pace(100, 0, [*slow, *fast]).left(90) == 40.0
    assert Pace(100, 0, [row(1), {**row(2), "seconds/grading": None}]).left(90) == pytest.approx(37.5)


def test_a_resumed_run_knows_what_the_whole_one_knew():
    rows = [row(step, 30.0 if step % 10 == 0 else None, rollout=step) for step in range(1, 90)]
    assert Pace(100, 10, rows[:71]).left(71) == Pace(100, 10, rows[20:71]).left(71)


def test_durations_in_words():
    assert [duration(seconds) for seconds in (0.2, 59.4, 59.6, 3_569)] == ["0 s", "59 s", "1 min", "59 min"]
    assert [duration(seconds) for seconds in (3_571, 7_800, 86_369)] == ["1 h 0 min", "2 h 10 min", "23 h 59 min"]
    assert [duration(seconds) for seconds in (86_371, 273_600)] == ["1 d 0 h", "3 d 4 h"]
