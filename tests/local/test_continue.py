"""Going on with a run: on the same records, for longer, after a kill, and what an interruption says."""

import io
import json
import math
import os
import shutil
import signal
import sys
import time
import types

import pytest
from rich.console import Console

from coca_mindspeed.cli import main
from coca_mindspeed.cli.watch import dashboard
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import LoggingConfig, LoraConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.local.logging import RunLog
from coca_mindspeed.local.model_files import TINY_MODEL, trained_bytes, weight_shapes
from coca_mindspeed.local.report import left_out
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.json_files import read_object, write_json
from tests.local.runs_for_tests import SMALL, killed, open_session, result, rows, small_session, train

TINY = ("warm_up.steps=3", "evaluation.interval=0", "rollout.prompts=4", "rollout.max_new_tokens=8")


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """A run of six steps, never stopped."""
    output = tmp_path_factory.mktemp("whole")
    train(output, *TINY)
    return output


def copy(source, target):
    shutil.copytree(source, target)
    return target


def test_a_finished_run_can_be_prolonged_bit_for_bit(tmp_path, six_steps):
    output = tmp_path / "run"
    train(output, *TINY, "trainer.steps=4")
    (output / "predictions_after.jsonl").write_text("of the shorter run")
    train(output, *TINY, "trainer.steps=6", resume=True)
    assert result(output) == result(six_steps)
    assert not (output / "predictions_after.jsonl").exists()
    small_session(output, *TINY, "trainer.steps=6", resume=True)  # its configuration is the new one


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("optimizer.schedule=cosine", 8, "has 6, found 8, but step 2 was taken in stage 0 at lr"),
        ("optimizer.warmup_steps=2", 8, None),
        ("optimizer.warmup_steps=2", 6, None),
        ("optimizer.warmup_steps=2", 3, "has 6, found 3, but step 4 .* would be in stage 1"),
        ("method=sequential", 8, "step 7 was taken in stage 1 .*, and would be in stage 0"),
    ],
)
def test_what_the_length_would_have_changed_is_refused(tmp_path, six_steps, before, after, message):
    """The steps taken stand in for those of a run with these settings: only its configuration is looked at."""
    output = copy(six_steps, tmp_path / "run")
    session_overrides = (*TINY, before)
    settings = compose_run("demo", [*SMALL, *session_overrides]).run.model_dump(mode="json")
    write_json(output / MARKER, {**read_object(output / MARKER), "settings": settings})
    if "sequential" in before:
        (output / "checkpoints" / "step_000006").rename(output / "checkpoints" / "step_000007")
    if message is None:
        small_session(output, *session_overrides, f"trainer.steps={after}", resume=True)
        return
    with pytest.raises(ConfigError, match=message):
        small_session(output, *session_overrides, f"trainer.steps={after}", resume=True)


@pytest.mark.parametrize(
    ("change", "same_samples"),
    [
        ("trainer.microbatch_tokens=60", True),
        ("model.gradient_checkpointing=true", True),
        ("rollout.batch_responses=4", False),
    ],
)
def test_keys_that_bound_memory_may_change(tmp_path, six_steps, change, same_samples):
    output = killed(six_steps, tmp_path / "run")
    train(output, *TINY, change, resume=True)
    before, after = rows(six_steps / "metrics.jsonl"), rows(output / "metrics.jsonl")
    assert after[:4] == before[:4]
    assert len(after) == 6
    if same_samples:
        for key in ("objective/grad_norm", "rollout/entropy"):
            assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-3)
    small_session(output, *TINY, change, resume=True).close()  # its configuration is the new one


def test_an_edited_copy_of_the_settings_is_another_run(tmp_path, six_steps):
    output = copy(six_steps, tmp_path / "run")
    file = output / "config.yaml"
    file.write_text(file.read_text().replace("temperature: 1.0", "temperature: 0.5", 1))
    with pytest.raises(ConfigError) as caught:
        open_session(compose_run(str(file)), output, resume=True)
    assert [problem[:3] for problem in caught.value.problems] == [("another-run", "rollout.temperature", 0.5)]


def test_other_records_under_the_same_path_are_refused(tmp_path):
    data = tmp_path / "own.jsonl"
    questions = [{"question": f"{i}+1=", "answer": f"{i + 1}", "metadata": {"instruction": ""}} for i in range(6)]
    own = (*TINY, "data=records", f"data.train={data}", "data.grader=exact", "trainer.steps=2")

    def write(changed=questions):
        data.write_text("".join(json.dumps(row) + "\n" for row in changed))

    write()
    train(tmp_path / "run", *own)
    for changed in (questions[1:], questions[::-1], [*questions[:-1], {**questions[-1], "answer": "7"}]):
        write(changed)
        with pytest.raises(ConfigError) as caught:
            small_session(tmp_path / "run", *own, resume=True)
        assert caught.value.problems[-1][:2] == ("another-run", "data.train.sha256")
    data.write_text("\n".join(json.dumps(row, indent=None, sort_keys=True) for row in questions))
    small_session(tmp_path / "run", *own, resume=True)  # other bytes, the same records


def test_leftovers_are_removed_or_put_back_and_strangers_files_are_not(tmp_path, six_steps):
    output = copy(six_steps, tmp_path / "run")
    for left in ("checkpoints/.step_000007.writing", "checkpoints/.removing_000002", ".model.writing"):
        (output / left).mkdir()
        (output / left / "half").touch()
    (output / "checkpoints" / "step_000006").rename(output / "checkpoints" / ".replaced_step_000006")
    (output / "model").rename(output / ".replaced_model")  # comes back
    for half in ("metrics.jsonl", "report.html", "coca-mindspeed.json"):
        (output / f".{half}.abcd_123").touch()
    for strange in (".replaced_thesis", "checkpoints/.notes.writing", ".vimrc"):
        (output / strange).mkdir()
    small_session(output, *TINY, resume=True)
    hidden = sorted(str(p.relative_to(output)) for p in output.rglob(".*"))
    assert hidden == [".lock", ".replaced_thesis", ".vimrc", "checkpoints/.notes.writing"]
    assert [c.step for c in list_checkpoints(output / "checkpoints")] == [4, 6]
    assert (output / "model" / "config.json").exists()


def test_the_size_of_checkpoints_is_known_before(six_steps):
    checkpoint = six_steps / "checkpoints" / "step_000006"
    size = sum(f.stat().st_size for f in checkpoint.rglob("*.*t*"))
    for shapes in (weight_shapes(checkpoint / "model"), TINY_MODEL):
        assert sum(trained_bytes(shapes, LoraConfig(), "adamw")) == pytest.approx(size, rel=0.05)


@pytest.fixture
def trained(tmp_path, six_steps):
    return copy(six_steps, tmp_path / "run")


def command(output, *more):
    return ["train", "demo", *SMALL, *TINY, "--output", str(output), "--resume", *more]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_evaluation_says_what_is_saved_and_missing(trained, monkeypatch, capsys, no_pictures, number):
    def interrupted(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(5)  # the handler interrupts it

    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr("coca_mindspeed.local.evaluation.predict", interrupted)
        assert main(command(trained)) == 130
    assert signal.getsignal(number) is before
    said = capsys.readouterr().err
    assert all(text in said for text in (str(trained / "model"), "predictions_after.jsonl", "--resume evaluates again"))
    if number == signal.SIGTERM:
        return
    assert main(command(trained, "evaluation.final_questions=7")) == 0
    shown = capsys.readouterr()
    assert "answering held-out questions, after 7/7" in shown.err
    predictions = read_predictions(trained / "predictions_after.jsonl")
    assert {(p.method, p.category, p.seed) for p in predictions} == {("coca", "math", 0)}
    assert len(predictions) == 7
    assert f"model: {trained / 'model'} (a" in shown.out  # unbroken, however long
    (trained / "predictions_after.jsonl").unlink()
    assert main(command(trained, "evaluation.final_questions=0", "--quiet")) == 0
    assert not (trained / "predictions_after.jsonl").exists()


def test_a_run_with_nothing_to_learn_says_so_once_and_watch_too(tmp_path, monkeypatch, capsys):
    """Two tokens are too few for a confidence, and without an end for an answer."""
    train(tmp_path / "run", *TINY, "rollout.max_new_tokens=2", "trainer.steps=6", "checkpoint.interval=0")
    said = capsys.readouterr().err
    assert said.count("warning: steps 1 to 5") == 1  # besides those of the first steps and of longer gold answers
    assert "warning: steps 1 to 2: no response states a valid confidence" in said
    assert "warning: steps 1 to 5: nothing to learn: in 100%" in said
    assert "docs/troubleshooting.md" in said
    console = Console(file=io.StringIO(), width=200)
    console.print(dashboard(tmp_path / "run")[0])
    assert "warning: nothing to learn" in console.file.getvalue()


@pytest.mark.parametrize(("logger", "name"), [("wandb", "name"), ("swanlab", "experiment_name")])
def test_a_logger_gets_every_step_and_an_id_of_the_runs_own_also_when_resumed(tmp_path, monkeypatch, logger, name):
    given, logged, closed = [], [], []

    class Run:
        def log(self, scalars, step):
            logged.append((step, scalars))

        def finish(self):
            closed.append(logger)

    package = types.ModuleType(logger)
    package.init = lambda **options: given.append(options) or Run()
    package.log, package.finish = Run().log, Run().finish  # SwanLab's are the module's
    monkeypatch.setitem(sys.modules, logger, package)
    logging = (*TINY, f"logging.{logger}=project", "evaluation.interval=1")
    for user in ("a", "b"):
        train(tmp_path / user / "mine", *logging, "trainer.steps=1")
    train(tmp_path / "a" / "mine", *logging, "trainer.steps=2", resume=True)
    a, b, again = (options["id"] for options in given)
    assert a == again != b
    assert [(options[name], options["resume"]) for options in given] == [("mine", "allow")] * 3
    assert len(a) == (21 if logger == "swanlab" else 32)  # the only form that SwanLab's older releases take
    assert ([step for step, _ in logged], len(closed)) == ([1, 1, 2], 3)
    assert all(math.isfinite(value) for _, scalars in logged for value in scalars.values())
    assert any(key.startswith("eval/") for key in logged[0][1])


def test_tensorboard_forgets_a_try_that_died_before_its_first_checkpoint(tmp_path):
    """metrics.jsonl starts anew as well."""
    for value, steps in ((1.0, 4), (2.0, 2)):
        log = RunLog(tmp_path, LoggingConfig(tensorboard=True), {}, "id", resume_step=0)
        for step in range(1, steps + 1):
            log.write(step, {"x": value}, {})
        log.close()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(1, 2.0), (2, 2.0)]


def test_the_report_counts_answers_that_are_left_out():
    counts = {"before": {"ungradable": 0, "n": 40}, "after": {"ungradable": 1_033, "n": 7}}
    assert "1,033 of 1,040 answers after" in left_out(counts)
    assert left_out({"after": counts["before"]}) == ""
