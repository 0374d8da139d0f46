"""The section ``coca`` of a verl configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from coca_mindspeed.config.values import KeyFacts
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.scoring.settings import ScoringSettings, checked_section

#: The name of our trainer, reward manager and advantage estimator in verl's registries.
NAME = "coca"
#: Our names of ``trainer.v1.trainer_mode``, and verl's of the same trainer.
TRAINERS = {NAME: "sync", f"{NAME}_colocate_async": "colocate_async", f"{NAME}_separate_async": "separate_async"}
_FREE = KeyFacts("free")


class VerlSettings(ScoringSettings):
    """The section ``coca``."""

    broken_groups: Annotated[int, _FREE] = Field(
        0, ge=0, description="allowed incomplete groups per step (and questions per validation); more end the run"
    )
    samples_interval: Annotated[int, _FREE] = Field(10, ge=0, description="steps between sample dumps; 0: none")
    samples_prompts: Annotated[int, _FREE] = Field(4, ge=1, description="questions per dump, with all responses")
    checkpoint_minutes: Annotated[float | None, _FREE] = Field(
        None, gt=0, description="minutes after which a step saves besides; null: by trainer.save_freq alone"
    )
    device_memory_gib: Annotated[float, _FREE] = Field(
        80.0, gt=0, description="GiB of a device, for the plan's memory estimate (Ascend A2, and a die of A3: 61)"
    )
    best_metric: Annotated[Literal["eval/accuracy", "eval/auroc", "eval/ece", "eval/brier"], _FREE] = Field(
        "eval/brier", description="held-out metric by which BestCheckpoint chooses; docs/verl.md"
    )

    def stage(self, step: int, total_steps: int) -> int:
        """The method's stage in a step (from 1); stages share the steps of a run equally."""
        stages = len(self.method.training_method.stages)
        return min((step - 1) * stages // total_steps, stages - 1)


def verl_settings(config: Mapping[str, Any]) -> VerlSettings:
    """Read the section ``coca`` of a whole verl configuration; raises ``ConfigError`` with a line for each problem."""
    section = config.get(NAME)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{NAME}: expected a section, found {section!r}; name the method, e.g. coca.method.name=coca, or write {{}}"
        )
    return checked_section(VerlSettings, section)
