"""A composed run for MindSpeed-RL, from its check to its training: each of its parts is read once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from coca_mindspeed.config.checks import steps_of_epochs
from coca_mindspeed.config.plan import Questions
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.flaws import questions_of
from coca_mindspeed.data.prompts import form_of
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, Problem
from coca_mindspeed.mindspeed.keys import RENAMES, NativeRun, native_key, translate
from coca_mindspeed.mindspeed.layout import layout_problems
from coca_mindspeed.mindspeed.model_config import Comparison, compare_model
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig, resolve_config
from coca_mindspeed.mindspeed.start.records import RecordFile, read_record_file


class Length(NamedTuple):
    """Iterations of a stage (None: unknown), the questions that they are counted from, and how these are known."""

    iterations: int | None
    questions: int | None
    origin: str
    problems: tuple[Problem, ...] = ()


def _is_here(path: str | None) -> TypeGuard[str]:
    return path is not None and Path(path).is_file()


@dataclass(frozen=True)
class ClusterRun:
    """A run, and what follows from it; ConfigError and DataError are raised by the first use of a part."""

    run: RunConfig

    @property
    def native(self) -> bool:
        """Whether the run's file is in MindSpeed-RL's layout."""
        return isinstance(self.run, NativeRun)

    def key(self, name: str) -> str:
        """The name that the run's file has for a key of ours."""
        return native_key(name) if self.native else name

    @property
    def stages(self) -> int:
        """Stages of the method."""
        return len(self.run.method.training_method.stages)

    @cached_property
    def values(self) -> dict[str, Any]:
        """MindSpeed-RL's sections."""
        return translate(self.run)

    @cached_property
    def resolved(self) -> ResolvedConfig:
        return resolve_config(self.run, self.values, self.key)

    @cached_property
    def layout_problems(self) -> list[Problem]:
        """Problems under the names of the resolved configuration's fields."""
        return layout_problems(self.resolved)

    @cached_property
    def model(self) -> Comparison:
        """The model's ``config.json`` beside the model that Megatron builds."""
        return compare_model(self.run.model.path, self.values, {} if self.native else RENAMES)

    @cached_property
    def length(self) -> Length:
        data = self.run.data
        questions, origin = data.rows, "data.rows, for the file is not here" if data.rows else "unknown"
        if data.name == "arithmetic":
            questions, origin = data.train_size, "data.train_size"
        elif _is_here(data.train):
            questions, origin = len(self.records[0]), str(data.train)
        if data.epochs is None:
            return Length(self.run.trainer.steps, questions, origin)
        if questions is None:
            return Length(None, questions, origin)
        try:
            iterations = steps_of_epochs(data.epochs, questions, self.run.rollout.prompts)
        except ConfigError as error:
            return Length(None, questions, origin, tuple(error.problems))
        return Length(iterations, questions, origin)

    @property
    def iterations(self) -> int | None:
        """Iterations of a stage; None if they are unknown."""
        return self.length.iterations

    @property
    def held_out(self) -> int:
        """Held-out questions; 0 if their file is not here."""
        return len(self.records[1])

    @property
    def validations(self) -> int:
        """Validations of a run: before the first iteration of a stage, at each interval, and behind the last one."""
        every, iterations = self.run.evaluation.interval, self.iterations
        return self.stages * (-(-iterations // every) + 1) if every and iterations is not None else 0

    @property
    def validation_responses(self) -> int:
        return self.validations * self.held_out * self.run.rollout.group_size

    @cached_property
    def files(self) -> dict[str, RecordFile]:
        """Record files that are here, by their absolute paths."""
        paths = [Path(file) for file in (self.run.data.train, self.run.data.evaluate) if _is_here(file)]
        return {str(path.absolute()): read_record_file(path) for path in paths}  # messages have the path as it is given

    @cached_property
    def records(self) -> tuple[Sequence[Record], Sequence[Record]]:
        """Records of training and those held out, of the files that are here."""

        def of(path: str | None) -> Sequence[Record]:
            file = None if path is None else self.files.get(str(Path(path).absolute()))
            return () if file is None else file.records

        return of(self.run.data.train), of(self.run.data.evaluate)

    @property
    def prompt(self) -> TrainedPrompt:
        """The form of the training questions' prompts."""
        run = self.run
        form = form_of(self.records[0], run.method, run.model.chat_template_kwargs)
        return TrainedPrompt.of_training(form, run.method, run.rollout.max_new_tokens, "bfloat16")

    @property
    def questions(self) -> Questions | None:
        """Questions of the records; None without those of training, or if the length is unknown."""
        if not self.records[0] or self.iterations is None:
            return None
        asked = self.iterations * self.stages * self.run.rollout.prompts
        return questions_of(*self.records, asked, self.run.data.grader)
