"""Keys of the section ``coca`` that the engines on MindSpeed-RL's and verl's configurations share."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import method_form
from coca_mindspeed.config.schema import METHOD_FACTS, RunConfig
from coca_mindspeed.config.values import Method
from coca_mindspeed.errors import ConfigError, GradingError, validation_problems
from coca_mindspeed.grading.registry import known_grader


def dump_is_due(interval: int, step: int) -> bool:
    """Whether the responses of ``step`` (from 1) are dumped: of the first and of each ``interval``-th step; 0: none."""
    return interval > 0 and (step == 1 or step % interval == 0)


def method_section(value: object) -> Any:
    """The section ``method``, which may be the name of a form in configs/method."""
    return method_form(value) if isinstance(value, str) else value


class EngineSection(BaseModel):
    """A section of an upstream configuration: no unknown keys, finite numbers."""

    # Options of a grader may be infinite or NaN: serialise them as constants, not as null.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


class ScoringSettings(EngineSection):
    """Method and grading."""

    method: Annotated[Method, METHOD_FACTS] = Field(
        method_settings(), description="the training method, or the name of a form in configs/method"
    )
    grader: str = Field("auto", description="grader; auto: by record; docs/grading.md")
    grading: dict[str, Any] = Field(default_factory=dict, description="options of the graders; docs/grading.md")
    require_evaluated: bool = Field(True, description="see data.require_evaluated")

    @model_validator(mode="before")
    @classmethod
    def _without_former_keys(cls, section: object) -> object:
        return _without_open_thinking(section) if isinstance(section, Mapping) else section

    @field_validator("method", mode="before")
    @classmethod
    def _named_form(cls, value: object) -> object:
        return method_section(value)

    @field_validator("grader")
    @classmethod
    def _known_grader(cls, value: str) -> str:
        try:
            return known_grader(value)
        except GradingError as error:
            raise ValueError(str(error)) from error


def scoring_settings(run: RunConfig) -> ScoringSettings:
    """Method and grading of a run in our own keys."""
    data, grading = run.data, run.data.grader_options
    evaluated = data.require_evaluated
    return ScoringSettings.model_construct(
        method=run.method, grader=data.grader, grading=grading, require_evaluated=evaluated
    )


def _without_open_thinking(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section without a key of earlier releases; raises ValueError where the key had an effect."""
    kept = dict(section)
    if kept.pop(_FORMER, False) is not False:
        raise ValueError(f"{_FORMER}: was removed: write coca.method.thinking=true (docs/method.md, Thinking)")
    return kept


_FORMER = "allow_open_thinking"
Settings = TypeVar("Settings", bound=ScoringSettings)


def stored_section(kind: type[Settings], section: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A section ``coca`` that an earlier release may have stored: checked, with the defaults of keys that it lacks.

    Keys that ``kind`` no longer has stay as they are.  Raises ConfigError, naming ``where``, for invalid values.
    """
    try:
        known = checked_section(kind, {k: v for k, v in section.items() if k in kind.model_fields or k == _FORMER})
    except ConfigError as error:
        raise ConfigError(
            f"{where}: the run to resume has settings that cannot be used:\n{error}", error.problems
        ) from error
    return {**_without_open_thinking(section), **known.model_dump(mode="json")}


def checked_section(kind: type[Settings], section: Mapping[str, Any]) -> Settings:
    """Validate a section ``coca``; raises ``ConfigError`` with all problems."""
    try:
        return kind.model_validate(dict(section))
    except ValidationError as error:
        problems = validation_problems(error, "coca")
        raise ConfigError("\n".join(map(str, problems)), problems) from error
