"""The arms of the study, and one training of an arm."""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.algorithm.credit import Credit, CreditRule
from coca_mindspeed.config.compose import ComposedConfig, compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.data.reserved import parts
from coca_mindspeed.evaluation.predictions import write_predictions
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import choose_device
from coca_mindspeed.local.run import LocalRun, warm_start
from coca_mindspeed.local.run_directory import with_model
from coca_mindspeed.local.sft import run_sft_warm_up
from coca_mindspeed.local.validation import read_warm_up_records
from coca_mindspeed.utils.files import is_ours, write_json
from experiments.miniature import SYMBOLS, miniature
from experiments.real_world.families import real_world_records
from experiments.reproduce.provenance import machine, source_commit


@dataclass(frozen=True)
class Arm:
    """One way to use the questions.

    Attributes:
        share: of the questions, reserved by hash.
        alone: both segments learn on the other questions, and nothing on the reserved ones.
        overlap: the confidence learns on the reserved questions alone, the answers (and the warm-up) on all.
    """

    share: float = 0.0
    alone: bool = False
    overlap: bool = False

    @property
    def warm_up_share(self) -> float:
        """Share of the questions that the warm-up leaves out."""
        return 0.0 if self.overlap else self.share


#: Names of the arms.  The first four are the option; the others are controls.
ARMS = {
    "share 0": Arm(),
    "share 0.1": Arm(0.1),
    "share 0.25": Arm(0.25),
    "share 0.5": Arm(0.5),
    "rest alone": Arm(0.25, alone=True),
    "overlap": Arm(0.25, overlap=True),
}


@dataclass(frozen=True)
class Study:
    """Questions and settings; ``base`` is a built-in run.

    Attributes:
        arms: names of the arms.
        samples: answers to each question of an evaluation.
        questions: returns the records of warm-up, training and evaluation.
    """

    base: str
    overrides: Sequence[str]
    arms: Sequence[str]
    samples: int
    questions: Callable[[], tuple[list[Record], list[Record], list[Record]]]


def _progressions() -> tuple[list[Record], list[Record], list[Record]]:
    data = miniature("long_repeated")
    return data.warm_up, data.train, data.evaluate


def _places() -> tuple[list[Record], list[Record], list[Record]]:
    """76 capitals and 116 cities, and held-out ones."""

    def records(part: Any, size: int) -> list[Record]:
        return [r for r in real_world_records(part, size, hardest=0.7) if r.dataset in ("capitals", "cities")]

    return real_world_records("warm_up", 80, hardest=0.7), records("train", 116), records("evaluate", 250)


STUDIES = {
    "miniature": Study(
        "demo",
        (
            *("warm_up.steps=700", "warm_up.batch=64", "rollout.prompts=32", "rollout.max_new_tokens=90"),
            *("trainer.steps=160", "method.advantage_scale=batch"),
        ),
        tuple(ARMS),
        4,
        _progressions,
    ),
    # 48 steps of 12 prompts ask each of the 192 questions three times.
    "smollm2": Study(
        "local",
        (
            *("model.path=models/smollm2", "model.compute_dtype=bfloat16", "model.gradient_checkpointing=false"),
            *("data.grader_options.factual.match=exact", "warm_up.steps=90", "warm_up.batch=16"),
            *("method.advantage_scale=batch", "method.entropy_bonus=0.02", "method.advantage_eps=0.5"),
            *("method.confidence_decimals=2", "rollout.prompts=12", "rollout.group_size=8"),
            *("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=24", "rollout.batch_responses=384"),
            *("optimizer.lr=2.5e-5", "optimizer.schedule=wsd", "trainer.steps=48", "trainer.minibatches=1"),
            *("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=2000"),
        ),
        tuple(name for name in ARMS if name != "share 0.1"),
        8,
        _places,
    ),
}


def run_arm(study: str, name: str, seed: int, output: Path, extra: Sequence[str] = ()) -> float:
    """Train one arm unless it is done, write its answers and then ``done.json``; returns the seconds.

    ``held_out.jsonl`` are answers to new questions, ``trained.jsonl`` to questions that the answers learned on, and
    ``reserved.jsonl`` to reserved ones; at most 500 questions each.
    """
    directory = output / study / f"seed_{seed}" / name.replace(" ", "_")
    if (directory / "done.json").exists():
        return 0.0
    plan, arm = STUDIES[study], ARMS[name]
    disable_progress_bar()
    started = time.perf_counter()
    warm_up, train, evaluate = _questions(plan, output / study / "questions")
    answered, reserved = parts(train, arm.share, seed)
    files = {"train": answered if arm.alone else train, "evaluate": evaluate}
    directory.mkdir(parents=True, exist_ok=True)
    for part, records in files.items():
        write_records(directory / f"{part}.jsonl", records)
    given = [
        *plan.overrides,
        *("data.name=records", "data.grader=auto", "evaluation.interval=0", "checkpoint.keep=1"),
        *(
            f"evaluation.samples={plan.samples}",
            "logging.tensorboard=false",
            "logging.samples_interval=0",
            "warm_up.records=null",
        ),
        *(f"data.{part}={directory / part}.jsonl" for part in files),
        *(f"seed={seed}", f"data.confidence_share={0.0 if arm.alone else arm.share}"),
        *extra,
    ]
    composed = compose_run(plan.base, given)
    config = composed.run
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    start = _start(config, parts(warm_up, arm.warm_up_share, seed)[0], output / study / "starts", arm.warm_up_share)
    composed = ComposedConfig(with_model(config, path=str(start)), plan.base)
    with (
        LocalRun.open(
            composed, directory / "run", resume=is_ours(directory / "run", "run"), show_progress=False
        ) as run,
        _answers_learn_on_all(arm.overlap),
    ):
        policy = run.start()
        run.train(policy)
        for part, records in (("held_out", evaluate), ("trained", answered), ("reserved", reserved)):
            unique = list({record.question: record for record in records}.values())[:500]
            write_predictions(directory / f"{part}.jsonl", run.held_out(policy).evaluate(unique, part))
    seconds = time.perf_counter() - started
    origin = {"source": source_commit(), "machine": machine(choose_device(config.trainer.device))}
    write_json(directory / "done.json", {"arm": name, "seed": seed, "seconds": seconds, "settings": given, **origin})
    return seconds


def _questions(plan: Study, directory: Path) -> tuple[list[Record], ...]:
    """The study's questions, written once."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{part}.jsonl" for part in ("warm_up", "train", "evaluate")]
    with _locked(directory / "lock"):
        if not files[-1].exists():
            for file, records in zip(files, plan.questions(), strict=True):
                write_records(file, records)
    return tuple(list(read_records(file)) for file in files)


def _start(config: RunConfig, records: Sequence[Record], output: Path, share: float) -> Path:
    """The start that all arms of a seed with the same warm-up have; the first that needs it makes it."""
    directory = output / f"seed_{config.seed}_share_{share:g}"
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / "lock"):
        device = choose_device(config.trainer.device)
        if config.model.path is None:
            return warm_start(config, directory, records, device, show_progress=False, symbols=SYMBOLS)
        if not (path := directory / "warm_start").exists():
            write_records(directory / "warm_up.jsonl", records)
            taught = config.warm_up.model_copy(update={"records": str(directory / "warm_up.jsonl")})
            config = config.model_copy(update={"warm_up": taught})
            policy = load_policy(Path(str(config.model.path)), config.model, device)
            run_sft_warm_up(policy, read_warm_up_records(config), config, directory, show_progress=False)
        return path


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@contextmanager
def _answers_learn_on_all(overlap: bool) -> Iterator[None]:
    """The control in which the reserved questions are not new: answers learn on them as well."""
    separate = CreditRule.__call__

    def call(self: CreditRule, *arguments: Any, reserved: Tensor | None = None, **named: Any) -> Credit:
        credit = separate(self, *arguments, reserved=reserved, **named)
        everywhere = separate(self, *arguments, **named).segments["answer"]
        return credit._replace(segments={**credit.segments, "answer": everywhere})

    if not overlap:
        yield
        return
    with patch.object(CreditRule, "__call__", call):
        yield
