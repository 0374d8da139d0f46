"""Runs of a few steps on the tiny model."""

import json
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.run import LocalRun
from coca_mindspeed.local.run_directory import Checkpoint
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


class Session(NamedTuple):
    """A run before its training."""

    run: LocalRun
    trainer: Trainer

    @property
    def resume_from(self) -> Checkpoint | None:
        return self.run.resume_from

    def close(self) -> None:
        self.run.close()


def open_session(composed, output: Path, *, resume: bool = False, show_progress: bool = False) -> Session:
    run = LocalRun.open(composed, output, resume=resume, show_progress=show_progress)
    try:
        return Session(run, run.trainer(run.start()))
    except BaseException:
        run.close()
        raise


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
