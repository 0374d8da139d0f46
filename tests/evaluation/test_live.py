"""The terminal view of a running training."""

import io
import json
import threading

import pytest
from rich.console import Console

from coca_mindspeed.cli import main, watch
from coca_mindspeed.cli.watch import dashboard
from coca_mindspeed.config.compose import compose_run, to_yaml
from coca_mindspeed.utils.directories import LOCK, PROGRESS
from coca_mindspeed.utils.progress import StepProgress


def show(path):
    stream = io.StringIO()
    Console(width=110, file=stream).print(dashboard(path)[0])
    return stream.getvalue()


@pytest.fixture
def run(tmp_path):
    rows = [{"step": i, "reward/confidence": -1 / i, "eval/auroc": None, "rollout/ece": 0.4 / i} for i in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_first_and_the_last_value_of_each_metric(run, tmp_path_factory):
    text = show(run)
    for shown in ("step 40", "-1.000", "-0.025", "AUROC, held out", "--"):
        assert shown in text
    assert "waiting for the first step" in show(tmp_path_factory.mktemp("empty"))


def test_the_stage_before_the_first_step_is_shown(tmp_path):
    with StepProgress(40, enabled=False, title="warm-up ", file=tmp_path / PROGRESS) as progress:
        progress.show(16)
    assert "warm-up 16/40" in show(tmp_path)
    (tmp_path / PROGRESS).write_text('{"title": "warm-')
    assert "waiting for the first step" in show(tmp_path)


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
    for place, file in (("no", None), ("empty", "notes.txt"), ("ascend", "mindspeed_rl.yaml"), ("loading", LOCK)):
        if file is not None:
            (run / place).mkdir()
            (run / place / file).touch()
        assert main(["watch", str(run / place), "--once"]) == (place in ("no", "empty"))
        assert (f"{run / place}: " in capsys.readouterr().err) == (place in ("no", "empty"))

    looks = []

    def stop(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", stop)
    before = threading.active_count()
    assert main(["watch", str(run)]) == 0
    assert len(looks) == 3
    assert threading.active_count() == before


def test_it_ends_with_the_run(run, monkeypatch):
    (run / "config.yaml").write_text(to_yaml(compose_run("demo", ["trainer.steps=41"]).run))
    looks = []

    def another_step(_):
        looks.append(1)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41}\n')

    monkeypatch.setattr(watch.time, "sleep", another_step)
    assert main(["watch", str(run)]) == 0
    assert looks == [1]
