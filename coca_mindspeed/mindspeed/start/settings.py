"""What this project adds to a MindSpeed-RL configuration: the section ``coca``, checked and typed.

Everything else in the file is MindSpeed-RL's own and passes through untouched.  Ray processes receive the settings as
JSON in an environment variable, because hooks run before any of them is given an argument.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.schema import MethodConfig
from coca_mindspeed.errors import ConfigError, GradingError
from coca_mindspeed.grading.registry import known_grader

#: The environment variable that carries :class:`ProcessSettings`.
VARIABLE = "COCA_MINDSPEED_PROCESS"


class _Section(BaseModel):
    # As constants, not as null: options of a grader may be anything.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


class HostSettings(_Section):
    """Only for ``platform: host``."""

    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of weights and activations")
    initial_weights: Path | None = Field(
        None, description="Hugging Face directory whose weights training starts from; null: Megatron's own draw"
    )


class CocaSettings(_Section):
    """The section ``coca``."""

    method: MethodConfig = Field(MethodConfig(), description="the training method and its choices, as everywhere")
    stage: int = Field(0, ge=0, description="stage of the method; only sequential has more than one")

    eval_data: Path | None = Field(None, description="held-out records (JSON Lines) for validation while training")
    eval_interval: int = Field(0, ge=0, description="iterations between validations; 0: none")
    samples_interval: int = Field(0, ge=0, description="iterations between dumps of samples; 0: none")
    samples_prompts: int = Field(2, ge=1, description="prompts of a dump, with all their responses")
    output_dir: Path | None = Field(None, description="where samples and validation results are written")
    keep_checkpoints: int | None = Field(None, ge=1, description="newest checkpoints kept; null: all")
    metrics_file: bool = Field(True, description="write every iteration's metrics to output_dir/metrics.jsonl")

    grader: str = Field("auto", description="for verifier_function [coca]; auto: every record's own; docs/grading.md")
    grading: dict[str, Any] = Field(default_factory=dict, description="options of the graders; see docs/grading.md")
    require_evaluated: bool = Field(True, description="a restated question earns nothing in training; docs/grading.md")
    rollout_log_probs: bool = Field(True, description="measure the gap between rollout and training log-probabilities")
    stall_timeout: float = Field(3600.0, gt=0, description="seconds without any progress after which a stage gives up")

    platform: Literal["npu", "host"] = Field("npu", description="npu, or host: without an NPU, on stand-ins")
    host: HostSettings = HostSettings()

    @field_validator("grader")
    @classmethod
    def _known_grader(cls, value: str) -> str:
        try:
            return known_grader(value)
        except GradingError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _consistent(self) -> "CocaSettings":
        stages = self.method.training_method.stages
        if self.stage >= len(stages):
            raise ValueError(f"stage: method {self.method.name} has stages 0 to {len(stages) - 1}, found {self.stage}")
        if self.eval_interval and self.eval_data is None:
            raise ValueError("eval_data: eval_interval is set, so held-out records are needed, found null")
        if (self.eval_interval or self.samples_interval) and self.output_dir is None:
            raise ValueError("output_dir: validation and samples need somewhere to be written to, found null")
        return self

    def credit_rule(self) -> CreditRule:
        """How the rewards of this stage become advantages."""
        return self.method.credit_rule(self.stage)


class ProcessSettings(_Section):
    """What every Ray process has to know before it imports MindSpeed-RL."""

    coca: CocaSettings
    mindspeed_rl_home: Path
    import_paths: tuple[Path, ...]
    release: str
    reference: bool = Field(description="whether a KL term, and so a reference model, is asked for")

    @classmethod
    def from_environment(cls) -> "ProcessSettings":
        """Those of this process.

        Raises:
            ConfigError: it was not started by this project's driver.
        """
        if VARIABLE not in os.environ:
            raise ConfigError(f"{VARIABLE} is not set: start training with coca-mindspeed, not with MindSpeed-RL's cli")
        return cls.model_validate_json(os.environ[VARIABLE])


def coca_settings(section: Mapping[str, Any]) -> CocaSettings:
    """Check the section ``coca``.

    Raises:
        ConfigError: one line for each problem, with key and value.
    """
    try:
        return CocaSettings.model_validate(dict(section))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(["coca", *map(str, problem["loc"])])
            shown = "" if problem["type"] == "value_error" else f" (found {problem['input']!r})"
            lines.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}")
        raise ConfigError("\n".join(lines)) from error
