"""The training loop: what it writes, what it survives, and that a stopped run ends like one that never was."""

import errno
import json
import math
import multiprocessing
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_mindspeed.cli import main
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.grading.verdict import ExactGrader, Outcome, Verdict
from coca_mindspeed.local import checkpoint as checkpoint_module
from coca_mindspeed.local import train as train_module
from coca_mindspeed.local.evaluation import HeldOut
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.local.update import NotFiniteError, update_policy
from coca_mindspeed.scoring import rollout as scoring
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_mindspeed.scoring.rollout import Scored
from coca_mindspeed.utils import saving
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.process import InterruptedRunError
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import (
    FINISHED,
    SMALL,
    arguments,
    killed,
    result,
    rows,
    run_command,
    run_killed,
    small_session,
    train,
)
from tests.support.waiting import Clock, until


def test_what_a_run_writes(finished):
    metrics = rows(finished / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(finished / "timing.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert ["eval/ece" in row for row in metrics] == [False, False, True, False, False, True]
    for name in ("reward/answer", "reward/confidence", "rollout/ece", "response/length", "rollout/invalid_share"):
        assert all(math.isfinite(row[name]) for row in metrics)
    assert [c.step for c in list_checkpoints(finished / "checkpoints")] == [4, 6]  # the newest two
    assert sorted(p.name for p in (finished / "samples").iterdir()) == [f"step_00000{s}.jsonl" for s in (1, 2, 4, 6)]
    assert len(list((finished / "tensorboard").iterdir())) == 1
    assert not [p for p in finished.rglob(".*") if p.is_dir()], "no temporary directory is left"


def test_metrics_are_those_of_the_responses(finished):
    """Recompute a step's metrics from the dump of all its responses."""
    dump, row = rows(finished / "samples" / "step_000002.jsonl"), rows(finished / "metrics.jsonl")[1]
    assert len(dump) == 32
    assert row["reward/answer"] == pytest.approx(sum(r["correct"] for r in dump) / 32)
    invalid = [r for r in dump if r["confidence"] is None]
    assert row["rollout/invalid_share"] == pytest.approx(len(invalid) / 32)
    for start in range(0, 32, 4):
        group = dump[start : start + 4]
        gesr = sum(r["correct"] for r in group) / 4
        for r in group:
            assert r["gesr"] == gesr
            expected = -1.0 if r["confidence"] is None else -((r["confidence"] - gesr) ** 2)
            assert r["confidence_reward"] == pytest.approx(expected, abs=1e-6)
        assert sum(r["answer_advantage"] for r in group) == pytest.approx(0, abs=1e-5)
    assert row["reward/confidence"] == pytest.approx(sum(r["confidence_reward"] for r in dump) / 32, abs=1e-6)
    assert row["response/length"] == pytest.approx(sum(r["tokens"] for r in dump) / 32)


def test_a_signal_while_a_step_is_being_saved_stops_after_the_next_step(tmp_path, monkeypatch):
    class Stop:
        """Set between the first look at it and the second."""

        looks = 0

        def is_set(self):
            self.looks += 1
            return self.looks > 1

    monkeypatch.setattr(train_module, "stop_request", lambda: nullcontext(Stop()))
    with pytest.raises(InterruptedRunError):
        train(tmp_path, "checkpoint.interval=0")
    [saved] = list_checkpoints(tmp_path / "checkpoints")
    assert saved.step == len(rows(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("method", ["sequential", pytest.param("rlcr", marks=pytest.mark.nightly)])
def test_other_methods_train_and_resume_bit_for_bit(tmp_path, method):
    overrides = (f"method={method}", "trainer.steps=3" if method == "sequential" else "trainer.steps=6")
    train(tmp_path / "whole", *overrides)
    stopped = killed(tmp_path / "whole", tmp_path / "stopped")
    trainer = train(stopped, *overrides, resume=True)
    assert trainer.config.method.name == method
    assert result(stopped) == result(tmp_path / "whole")
    stages = [row["stage"] for row in rows(tmp_path / "whole" / "metrics.jsonl")]
    assert stages == ([0, 0, 0, 1, 1, 1] if method == "sequential" else [0] * 6)


def test_a_run_is_resumed_by_its_directory_alone(finished, tmp_path, capsys):
    stopped = killed(finished, tmp_path / "stopped")
    more = "evaluation.final_questions=0"
    assert main(["train", "--resume", "--output", str(stopped), more, "--quiet"]) == 0, capsys.readouterr().err
    assert result(stopped) == result(finished)
    for options in (["--output", str(stopped)], ["--output", str(tmp_path / "none"), "--resume"]):
        assert main(["train", *options]) == 2


def arguments_of(output: Path, *more: str) -> list[str]:
    fast = ("checkpoint.interval=1", "trainer.steps=8", "evaluation.interval=4", "checkpoint.best=eval/brier")
    fast += ("evaluation.final_questions=0",)
    return ["train", "demo", *SMALL, *fast, "--output", str(output), *more]


def forked(target: Callable[..., object], *arguments: object) -> multiprocessing.process.BaseProcess:
    """A process forked by one that has imported everything: the imports take longer than these runs."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.local.runs_for_tests"])
    process = processes.Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("moments", [(60, 150), pytest.param((60, 150, 150, 150), marks=pytest.mark.nightly)])
def test_sigkill_at_random_moments_changes_nothing(tmp_path, moments):
    """Killed during warm-up, during steps and during checkpoints, again and again, then resumed to the end."""
    assert main(arguments_of(tmp_path / "whole", "--quiet")) == 0
    output, rng = tmp_path / "killed", random.Random(0)
    for most in moments:  # uses of files: for the warm-up, and for three steps each
        resume = ["--resume"] if (output / MARKER).exists() else []
        process = forked(run_killed, arguments_of(output, *resume, "--quiet"), output, rng.randrange(most))
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert main(arguments_of(output, "--resume", "--quiet")) == 0
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
    best = [{p.name: p.read_bytes() for p in (tmp_path / run / "best_model").iterdir()} for run in ("killed", "whole")]
    assert best[0] == best[1]
    assert "best.json" in best[0]


@pytest.mark.parametrize(
    ("metric", "values", "step"),
    [("eval/brier", [0.5, 0.3, math.nan, 0.4, 0.3], 2), ("eval/auroc", [0.5, 0.6, 0.9, 0.7, math.nan], 3)],
)
def test_the_best_model_is_kept_beside_the_newest_checkpoints(tmp_path, monkeypatch, metric, values, step):
    monkeypatch.setattr(
        HeldOut, "while_training", lambda _, number, *__: {metric: values[number - 1]} if number < 6 else {}
    )
    keys = (f"checkpoint.best={metric}", "evaluation.interval=1", "checkpoint.interval=1", "checkpoint.keep=1")
    output, best = tmp_path / "run", tmp_path / "run" / "best_model"
    weights = best / "model.safetensors"
    train(output, *keys, f"trainer.steps={step}")
    kept = weights.read_bytes()
    assert kept == (output / "model" / "model.safetensors").read_bytes()
    best.rename(output / ".replaced_best_model")  # killed while it was replaced
    (output / ".best_model.writing").mkdir()
    train(output, *keys, "trainer.steps=5", resume=True)
    assert json.loads((best / "best.json").read_text()) == {"metric": metric, "value": values[step - 1], "step": step}
    assert weights.read_bytes() == kept != (output / "model" / "model.safetensors").read_bytes()
    assert [c.step for c in list_checkpoints(output / "checkpoints")] == [5]
    AutoModelForCausalLM.from_pretrained(best)


@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_go_on(tmp_path):
    output = tmp_path / "run"
    arguments = arguments_of(output, "trainer.steps=100000", "checkpoint.interval=0")
    process = forked(run_command, arguments, tmp_path / "errors")
    metrics = output / "metrics.jsonl"
    until(lambda: (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3) or not process.is_alive(), 300)
    process.terminate()
    process.join(300)
    errors = (tmp_path / "errors").read_text()
    assert process.exitcode == 130
    (saved,) = list_checkpoints(output / "checkpoints")
    assert saved.step == rows(output / "metrics.jsonl")[-1]["step"] >= 2
    assert f"step {saved.step}" in errors
    assert f"{saved.path}" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_a_step_is_saved_by_the_clock_too(tmp_path, monkeypatch):
    """The second step takes 40 minutes."""
    clock, minutes = Clock(monkeypatch, saving), iter((0, 40, 0, 0))

    def slow(*arguments):
        clock.ahead += 60 * next(minutes)
        return update_policy(*arguments)

    monkeypatch.setattr("coca_mindspeed.local.train.update_policy", slow)
    train(tmp_path, "trainer.steps=4", "checkpoint.interval=0", "checkpoint.minutes=30")
    assert [saved.step for saved in list_checkpoints(tmp_path / "checkpoints")] == [2, 4]


def test_a_loss_that_is_not_finite_stops_before_the_weights(finished, tmp_path, monkeypatch):
    session = small_session(killed(finished, tmp_path / "run"), *FINISHED, resume=True)
    trainer = session.trainer
    calls = 0

    def poisoned(policy, rollout, credited, *rest):
        nonlocal calls
        calls += 1
        if calls == 2:
            credited.token_advantages.fill_(math.nan)
        return update_policy(policy, rollout, credited, *rest)

    monkeypatch.setattr("coca_mindspeed.local.train.update_policy", poisoned)
    with pytest.raises(TrainingError, match=r"(?s)step 6: objective/loss is nan.*step_000004"):
        trainer.run(session.resume_from)
    assert all(bool(p.isfinite().all()) for p in trainer.policy.model.parameters())
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 5


def test_weights_that_are_not_finite_end_the_run_by_its_step(finished, tmp_path, monkeypatch):
    session = small_session(killed(finished, tmp_path / "run"), *FINISHED, resume=True)
    updates = iter((5, 6))

    def spoiled(policy, *rest):
        metrics = update_policy(policy, *rest)
        if next(updates) == 6:  # which held-out questions follow
            next(iter(policy.model.parameters())).data.fill_(math.nan)
        return metrics

    monkeypatch.setattr("coca_mindspeed.local.train.update_policy", spoiled)
    with pytest.raises(TrainingError, match=r"(?s)step 6: .*step_000004.*--resume"):
        session.trainer.run(session.resume_from)


_OUT_OF_MEMORY = r"step 1: out of memory \(.+\)\n.*trainer\.microbatch_tokens.*\nno checkpoint was written before it"


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A trainer before its first step, at which each test makes it fail."""
    return small_session(tmp_path_factory.mktemp("waiting") / "run").trainer


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), TrainingError, _OUT_OF_MEMORY),
        (RuntimeError("[..] DefaultCPUAllocator: can't allocate memory"), TrainingError, _OUT_OF_MEMORY),
        (MemoryError("Unable to allocate 8 GiB"), TrainingError, _OUT_OF_MEMORY),
        (MemoryError(), TrainingError, _OUT_OF_MEMORY),
        (NotFiniteError("objective/loss is nan"), TrainingError, "step 1: objective/loss is nan\nno checkpoint"),
        (RuntimeError("shapes do not match"), RuntimeError, "shapes do not match"),
    ],
    ids=["cuda", "cpu", "numpy", "python", "not finite", "another"],
)
def test_errors_of_a_step_are_explained(waiting, monkeypatch, error, kind, message):
    """Also where the logs cannot be closed, which must not hide what ended the run."""

    def fails(*_):
        raise error

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("coca_mindspeed.local.train.update_policy", fails)
    monkeypatch.setattr("coca_mindspeed.local.logging.RunLog.close", full)
    with pytest.raises(kind, match=message):
        waiting.run()


def test_a_disk_that_fills_up_loses_no_checkpoint(finished, tmp_path, monkeypatch):
    save = torch.save

    def full(value, file):
        if "000006" in file.name:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, file)

    monkeypatch.setattr(checkpoint_module.torch, "save", full)
    output = killed(finished, tmp_path / "run")
    with pytest.raises(TrainingError, match=r"step 6: .*No space left.*step_000006/optimizer\.pt.*step_000004"):
        train(output, *FINISHED, resume=True)
    assert [c.step for c in list_checkpoints(output / "checkpoints")] == [4]
    assert not list((output / "checkpoints").glob(".*"))
    monkeypatch.undo()
    train(output, *FINISHED, resume=True)
    assert result(output) == result(finished)


def test_a_small_disk_is_said_before_the_first_step(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2_000_000})
    monkeypatch.setattr("coca_mindspeed.local.run_directory.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"(?s)2 MiB .* 4 MiB .*checkpoint\.keep=1"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    small_session(tmp_path / "run", "trainer.steps=1", "checkpoint.interval=50").close()  # one checkpoint of 1.3 MB


def test_another_run_is_not_resumed(finished, tmp_path, capsys):
    output = shutil.copytree(finished, tmp_path / "run")
    assert main(["train", "demo", *SMALL, "--output", str(output)]) == 1
    assert "already holds a run; add --resume" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.0005, found 0\.01"):
        small_session(output, *FINISHED, "optimizer.lr=0.01", resume=True)
    with pytest.raises(ConfigError, match="seed=0, found 1"):
        small_session(output, *FINISHED, "seed=1", resume=True)
    small_session(output, *FINISHED, "evaluation.interval=1", "checkpoint.keep=5", resume=True)


def test_a_damaged_optimizer_state_is_named(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    older, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    shutil.rmtree(newest.path)
    (older.path / "optimizer.pt").write_bytes(b"damaged")
    with pytest.raises(TrainingError, match=r"step_000004/optimizer\.pt: "):
        train(tmp_path / "run", *FINISHED, resume=True)


def test_any_hugging_face_directory_and_jsonl_data(tmp_path, capsys):
    model = write_random_model(tmp_path / "model", "qwen2")
    more = ("rollout.max_new_tokens=12", "trainer.steps=2", "optimizer.lr=1e-3", "evaluation.final_questions=6")
    assert main(arguments(tmp_path, model, *more)) == 0, capsys.readouterr().err
    predictions = rows(tmp_path / "run" / "predictions_after.jsonl")
    assert [p["id"] for p in predictions] == [f"heldout-{i}" for i in range(1, 7)]
    assert set(predictions[0]) >= {"id", "dataset", "question", "response", "confidence", "correct"}
    before = AutoModelForCausalLM.from_pretrained(model)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    # Nobody is right and nobody states a confidence: there is nothing to learn, and nothing moves.
    row = rows(tmp_path / "run" / "metrics.jsonl")[1]
    assert row["rollout/invalid_share"] == 1.0
    assert row["group/no_answer_variance_share"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_the_credit_is_given_the_log_probs_of_the_confidences(tmp_path, monkeypatch):
    sampled, given, original = [], [], Scored.give_credit

    def give_credit(self, *arguments, log_probs=None, **options):
        given.append((self, log_probs))
        return original(self, *arguments, log_probs=log_probs, **options)

    def respond(*arguments):
        sampled.append(train_respond(*arguments))
        return sampled[-1]

    train_respond = train_module.respond
    monkeypatch.setattr(train_module, "respond", respond)
    monkeypatch.setattr(Scored, "give_credit", give_credit)
    train(tmp_path / "run", "warm_up.steps=1", "trainer.steps=1", "method.entropy_bonus=0.1")
    ((scored, log_probs),), (rollout,) = given, sampled
    ends = scored.segment_ends[:, 0].tolist()
    expected = [float(row[:end].double().sum()) for row, end in zip(rollout.log_probs, ends, strict=True)]
    assert log_probs.tolist() == pytest.approx(expected)
    assert any(end < length for end, length in zip(ends, rollout.lengths.tolist(), strict=True))


@pytest.mark.parametrize("required", [True, False])
def test_restated_questions_earn_nothing_in_training_and_are_graded_by_value_in_evaluations(
    tmp_path, monkeypatch, required
):
    right = [Verdict(Outcome.RIGHT)]
    monkeypatch.setattr(ExactGrader, "grade", lambda self, records, answers: right * len(records))
    monkeypatch.setattr(scoring, "reject_unevaluated", lambda *given: [Verdict(Outcome.WRONG)] * len(given[0]))
    few = ("warm_up.steps=1", "trainer.steps=2", "evaluation.interval=2", "data.grader=exact")
    train(tmp_path / "run", *few, f"data.require_evaluated={str(required).lower()}")
    metrics, timing = (rows(tmp_path / "run" / name)[-1] for name in ("metrics.jsonl", "timing.jsonl"))
    assert (metrics["reward/answer"], metrics["eval/accuracy"]) == (1 - required, 1)
    assert timing["grading/unevaluated"] == 64 * required  # of both steps


def test_a_rollout_crosses_the_modules_that_the_architecture_page_lists(tmp_path, monkeypatch):
    crossed = {"local.train"}

    def note(frame, event, _):
        if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("coca_mindspeed."):
            crossed.add(name.removeprefix("coca_mindspeed."))

    def noted(function):
        def call(*args, **kwargs):
            sys.setprofile(note)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call

    for name in ("question_order", "generator", "respond", "CreditRule", "update_policy"):
        monkeypatch.setattr(train_module, name, noted(getattr(train_module, name)))
    for kind, name in ((ResponseScorer, "__call__"), (ResponseScorer, "for_training"), (Scored, "give_credit")):
        monkeypatch.setattr(kind, name, noted(getattr(kind, name)))
    train(tmp_path / "run", "warm_up.steps=1", "trainer.steps=1")

    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("### Modules that a rollout crosses")[1].split("\n## ")[0]
    shared, number, own = re.search(r"modules are (.*?): (\d+) .*\| `local/` \| (.*?) \|", section, re.DOTALL).groups()
    listed = {f"local.{name}" for name in re.findall(r"`(\w+)`", own)}
    for folder, names in re.findall(r"`([\w/]+)/\{?([\w,]+)\}?`", shared):
        listed |= {f"{folder}/{name}".replace("/", ".").removesuffix(".__init__") for name in names.split(",")}
    examples = {"algorithm.methods.METHOD": "algorithm.methods.coca", "grading.GRADER": "grading.verdict"}
    assert {examples.get(name, name) for name in listed} == {n for n in crossed if not n.startswith("utils.")}
    assert len([name for name in listed if not name.startswith("local.")]) == int(number)
