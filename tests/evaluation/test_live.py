"""The terminal view of a running training."""

import io
import json
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from coca_mindspeed.cli import main, watch
from coca_mindspeed.cli.watch import dashboard, sparkline
from coca_mindspeed.config.compose import compose_run, to_yaml
from coca_mindspeed.config.run_marker import RunMarker
from coca_mindspeed.utils.directories import LOCK, PROGRESS, is_running, write_marker
from coca_mindspeed.utils.progress import StepProgress


def show(path):
    stream = io.StringIO()
    Console(width=110, file=stream).print(dashboard(path)[0])
    return stream.getvalue()


@pytest.fixture
def run(tmp_path):
    rows = [{"step": i, "reward/confidence": -1 / i, "eval/auroc": None, "rollout/ece": 0.4 / i} for i in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "samples").mkdir()
    samples = [{"confidence": 0.9, "correct": i < 3} for i in range(4)] + [{"confidence": None, "correct": False}]
    (tmp_path / "samples" / "step_000040.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return tmp_path


def test_scalars_and_reliability(run):
    text = show(run)
    for shown in ("step 40", "-1.000", "-0.025", "AUROC, held out", "--", "4 of 5", "ECE 0.150"):
        assert shown in text
    [line] = [line for line in text.splitlines() if "0.8-0.9" in line]
    assert " 4 " in line
    assert "0.75" in line
    assert line.count("█") == 22  # three quarters of 30
    assert "samples, step 40 " in text
    (run / "samples" / "step_000010.jsonl").touch()
    assert "samples, steps 10 to 40 " in show(run)


@pytest.mark.parametrize(("method", "shown"), [("coca", True), ("rlvr", False)])
def test_a_confidence_reward_is_shown_of_a_method_that_has_one(run, method, shown):
    config = compose_run("local", [f"method={method}", "model.path=m", "data.train=t"])
    (run / "config.yaml").write_text(config.to_yaml())
    assert ("confidence reward" in show(run)) is shown


def test_a_run_that_has_just_begun(run, tmp_path_factory):
    (run / "samples" / "step_000040.jsonl").unlink()
    assert "no rollout samples yet" in show(run)
    assert "waiting for the first step" in show(tmp_path_factory.mktemp("empty"))
    assert [sparkline(values) for values in ([0, 1], [float("nan")], [1, 1])] == ["▁█", "", "▁▁"]
    assert len(sparkline(range(1000), 30)) == 30


def test_the_stage_before_the_first_step_is_shown(tmp_path):
    with StepProgress(40, enabled=False, title="warm-up ", file=tmp_path / PROGRESS) as progress:
        progress.show(16)
    assert "warm-up 16/40" in show(tmp_path)
    (tmp_path / PROGRESS).write_text('{"title": "warm-')
    assert "waiting for the first step" in show(tmp_path)


def test_a_folder_without_a_run_is_refused_with_the_runs_in_it(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 1
    write_marker(tmp_path / "local", "run")
    write_marker(tmp_path / "exported", "model")
    RunMarker(engine="mindspeed_rl", settings={}).write(tmp_path / "ascend" / "stage0", resumed=False)
    capsys.readouterr()
    assert main(["watch", str(tmp_path)]) == 1
    commands = [line.split() for line in capsys.readouterr().err.splitlines()[1:]]
    assert {command[-1] for command in commands} == {f"{tmp_path}/{name}" for name in ("local", "ascend/stage0")}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / LOCK).touch()  # it loads its model
    for run in ("local", "ascend/stage0", "new"):
        assert main(["watch", str(tmp_path / run), "--once"]) == 0


def test_how_far_it_is_and_how_long_it_will_take(run):
    config = compose_run("demo", ["method=sequential", "trainer.steps=150", "evaluation.interval=100"]).run
    (run / "config.yaml").write_text(to_yaml(config))
    assert "step 40 of 300 ─" in show(run)
    timing = [{"step": step, "seconds/rollout": 3.0, "seconds/evaluation": None} for step in range(1, 41)]
    (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing) + '{"step": 4')
    assert "step 40 of 300, about 13 min left" in show(run)
    (run / "config.yaml").write_text(to_yaml(config).replace("trainer:", "another_releases_key: 1\ntrainer:"))
    assert "step 40 ─" in show(run)
    (run / "config.yaml").write_text("- 1\n")
    assert "step 40 ─" in show(run)


def test_command(run, capsys, monkeypatch):
    assert main(["watch", str(run), "--once"]) == 0
    assert "confidence reward" in capsys.readouterr().out
    assert main(["watch", str(run / "no")]) == 1
    assert "is not a directory" in capsys.readouterr().err

    looks = []

    def stop(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", stop)
    assert main(["watch", str(run)]) == 0  # into a file: once
    assert "confidence reward" in capsys.readouterr().out
    assert not looks
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    before = threading.active_count()
    assert main(["watch", str(run), "--interval", "0.5"]) == 0
    assert looks == [0.5, 0.5, 0.5]
    assert threading.active_count() == before


def test_it_ends_with_the_run(run, monkeypatch):
    (run / "config.yaml").write_text(to_yaml(compose_run("demo", ["trainer.steps=41"]).run))
    looks = []

    def another_step(_):
        looks.append(1)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41}\n')

    monkeypatch.setattr(watch.time, "sleep", another_step)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["watch", str(run)]) == 0
    assert looks == [1]


HOLD = """
import sys
from pathlib import Path
from coca_mindspeed.utils.directories import lock_run
with lock_run(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the lock of another process is asked for on Linux only")
def test_a_run_that_was_stopped_is_told_from_one_that_goes_on(run, tmp_path_factory):
    (run / "config.yaml").write_text(to_yaml(compose_run("demo", ["trainer.steps=300"]).run))
    timing = [{"step": step, "seconds/rollout": 3.0, "seconds/evaluation": None} for step in range(1, 41)]
    (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing))
    new = tmp_path_factory.mktemp("new")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"locked\n"
        assert is_running(run) is True
        assert dashboard(run)[1] is False
        assert "left" in show(run)
        assert "stopped after" not in show(run)
        process.communicate()
    (run / LOCK).touch()  # as of a run that has written files
    assert is_running(run) is False
    assert dashboard(run)[1] is True
    assert "stopped after step 40" in show(run)
    assert "left" not in show(run)
    assert (is_running(new), dashboard(new)[1]) == (None, False)  # of an engine without a lock
    (new / LOCK).touch()
    assert dashboard(new)[1] is True
    assert "stopped before its first step" in show(new)


def test_a_runs_own_method_is_not_executed(run, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Method: ...\n")
    config = to_yaml(compose_run("demo").run).replace("name: coca\n", f"name: {tmp_path}/evil.py:Method\n")
    assert "evil.py" in config
    (run / "config.yaml").write_text(config)
    assert "step 40 ─" in show(run)
    assert not (tmp_path / "ran").exists()
