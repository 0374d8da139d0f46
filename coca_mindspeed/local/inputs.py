"""Records, grader and configuration of a local run, before its weights are read.  torch is not imported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import ResponseFormat
from coca_mindspeed.config.plan import Questions
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.data.arithmetic import Split, arithmetic_records
from coca_mindspeed.data.flaws import questions_of
from coca_mindspeed.data.prompts import form_of
from coca_mindspeed.data.records import Record
from coca_mindspeed.data.registry import read_own
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.run_directory import RunState


@dataclass(frozen=True)
class RunInputs:
    """Records, grader and complete configuration of a run whose weights are not read yet."""

    state: RunState  # of its directory
    config: RunConfig  # complete: with the number of steps, and the directory of a model of the hub
    grader: MeasuredGrader
    train: Sequence[Record]
    evaluate: Sequence[Record]
    warm_up: Sequence[Record]
    digests: Mapping[str, Mapping[str, Any]]  # of the records, by the names of the sets
    model: Path | None  # that the run starts from; None: the built-in one
    where: str  # names the model in messages
    show_progress: bool

    @cached_property
    def questions(self) -> Questions:
        asked = self.config.total_steps * self.config.rollout.prompts
        return questions_of(self.train, self.evaluate, asked, self.config.data.grader)


def load_data(config: DataConfig) -> tuple[list[Record], list[Record]]:
    """Training and held-out records; raises DataError if a file cannot be read or holds no records."""
    if config.name == "arithmetic":
        return _arithmetic(config, "train"), _arithmetic(config, "evaluate")
    train = _read("data.train", str(config.train), config.columns)
    if config.evaluate is None:
        return train, []
    return train, _read("data.evaluate", config.evaluate, config.columns_of_evaluate)


def trained_prompt(config: RunConfig, train: Sequence[Record]) -> TrainedPrompt:
    """Return the form of the prompts of a run that trains on ``train``."""
    form = form_of(train, config.method, config.model.chat_template_kwargs)
    dtype = None if config.model.compute_dtype == "auto" else config.model.compute_dtype
    return TrainedPrompt.of_training(form, config.method, config.rollout.max_new_tokens, dtype)


def _arithmetic(config: DataConfig, split: Split) -> list[Record]:
    size = config.train_size if split == "train" else config.evaluate_size
    try:
        return arithmetic_records(size, split, config.seed)
    except ValueError as error:
        raise DataError(f"data.{split}_size={size}: {error}") from error


def _read(key: str, path: str, columns: Mapping[str, str]) -> list[Record]:
    records = read_own(path, columns)
    if not records:
        raise DataError(f"{key}={path}: holds no records")
    return records


def read_warm_up_records(config: RunConfig) -> list[Record]:
    """The records of ``warm_up.records``, if it is set; DataError if one of their answers cannot be a response."""
    if config.warm_up.records is None:
        return []
    records = _read("warm_up.records", config.warm_up.records, config.data.columns)
    for record in records:
        where = f"warm_up.records: {record.name}"
        if not record.answer.strip():
            raise DataError(f"{where} has no answer")
        if config.warm_up.wrong_answers and not any(character.isdecimal() for character in record.answer):
            raise DataError(
                f"{where}: warm_up.wrong_answers={config.warm_up.wrong_answers:g} changes a digit, and its answer "
                f"{record.answer!r:.80} has none; set warm_up.wrong_answers=0"
            )
    return records


_DECIMALS = 2  # of a confidence where the method asks for no number of them


def warm_up_format(method: MethodSettings) -> ResponseFormat:
    """The format of the responses of ``warm_up.records``."""
    position, decimals = method.training_method.confidence_position, method.confidence_decimals or _DECIMALS
    return ResponseFormat(position, decimals, spaced=True, thinking=method.thinking)
