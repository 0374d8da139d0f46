"""Runs of a few steps on the tiny model, and on a model of one's own."""

import itertools
import json
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.run import LocalRun
from coca_mindspeed.local.run_directory import Checkpoint, list_checkpoints
from coca_mindspeed.local.start import open_run
from coca_mindspeed.local.train import Trainer

SMALL = (
    "warm_up.steps=15",
    "warm_up.batch=32",
    "data.train_size=70",
    "data.evaluate_size=35",
    "rollout.prompts=8",
    "rollout.group_size=4",
    "trainer.steps=6",
    "evaluation.interval=3",
    "evaluation.questions=20",
    "evaluation.preflight=0",
    "checkpoint.interval=2",
    "logging.samples_interval=2",
    "logging.tensorboard=false",
)
#: What the run of the fixture ``finished`` sets besides; all responses of a dumped step are kept.
FINISHED = ("logging.tensorboard=true", "logging.samples_prompts=8")
QUESTIONS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]
HELD_OUT = [{"question": f"What is {i} + {i} in all?", "answer": str(2 * i)} for i in range(6)]


class Session(NamedTuple):
    """A run before its training."""

    run: LocalRun
    trainer: Trainer
    opened: ExitStack

    @property
    def resume_from(self) -> Checkpoint | None:
        return self.run.inputs.state.newest

    def close(self) -> None:
        self.opened.close()


def open_session(composed, output: Path, *, resume: bool = False, show_progress: bool = False) -> Session:
    with ExitStack() as opened:
        run = opened.enter_context(open_run(composed, output, resume=resume, show_progress=show_progress))
        return Session(run, run.trainer(run.start()), opened.pop_all())


def small_session(output: Path, *overrides: str, resume: bool = False):
    return open_session(compose_run("demo", [*SMALL, *overrides]), output, resume=resume)


def train(output: Path, *overrides: str, resume: bool = False):
    session = small_session(output, *overrides, resume=resume)
    session.trainer.run(session.resume_from)
    return session.trainer


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(output: Path) -> tuple[bytes, bytes, dict[str, bytes]]:
    """What must not depend on when a run was stopped: weights, metrics and samples, byte for byte."""
    samples = {p.name: p.read_bytes() for p in sorted((output / "samples").iterdir())}
    return (output / "model" / "model.safetensors").read_bytes(), (output / "metrics.jsonl").read_bytes(), samples


def killed(finished: Path, output: Path) -> Path:
    """A copy of a finished run, as a kill before its last checkpoint leaves it."""
    shutil.copytree(finished, output)
    shutil.rmtree(list_checkpoints(output / "checkpoints")[-1].path)
    shutil.rmtree(output / "model")
    return output


def run_command(arguments: list[str], errors: Path) -> None:
    """The command line in a forked process, with its standard error in a file."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


def run_killed(arguments: list[str], output: Path, after: int) -> None:
    """The command line, killed by SIGKILL after so many uses of files below ``output``, as it begins another."""
    uses = itertools.count()

    def kill(event: str, values: tuple[object, ...]) -> None:
        if event in _USES_OF_FILES and str(values[0]).startswith(str(output)) and next(uses) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    main(arguments)


_USES_OF_FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}  # as Python's audit events are called


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own_run(directory: Path, model: Path) -> list[str]:
    """A run of one step on ``model`` and two files of records in ``directory``, as it is typed behind a command."""
    return [
        *("local", f"model.path={model}", f"data.train={directory / 'train.jsonl'}", "data.grader=exact"),
        *(f"data.evaluate={directory / 'heldout.jsonl'}", "rollout.prompts=2", "rollout.group_size=2"),
        *("rollout.max_new_tokens=8", "trainer.steps=1", "trainer.device=cpu", "model.compute_dtype=float32"),
        *("trainer.minibatches=1", "logging.tensorboard=false", "evaluation.interval=0", "trainer.threads=1"),
        *("evaluation.preflight=0", "evaluation.final_questions=0"),  # the report's pictures take seconds
    ]


def arguments(directory: Path, model: Path, *more: str) -> list[str]:
    """The command that trains :func:`own_run`, and its files if they are missing."""
    for name, rows in (("train", QUESTIONS), ("heldout", HELD_OUT)):
        if not (directory / f"{name}.jsonl").exists():
            write_rows(directory / f"{name}.jsonl", rows)
    return ["train", *own_run(directory, model), "--output", str(directory / "run"), "--quiet", *more]
