"""What this project adds to a verl configuration: the section ``coca``, checked and typed.

Everything else in the file is verl's own; :mod:`.checks` says which of it the method depends on.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.scoring.settings import EngineSection, JudgingSettings, checked_section

#: The name of our trainer, reward manager and advantage estimator in verl's registries.
NAME = "coca"


class DeviceSettings(EngineSection):
    """Only for the plan that ``coca-mindspeed check`` prints."""

    memory_gib: float = Field(80.0, gt=0, description="memory of one GPU or NPU")
    model: str | None = Field(
        None, description="whose shape, as configs/model/NAME.yaml says it; null: the plan has no memory"
    )


class VerlSettings(JudgingSettings):
    """The section ``coca``."""

    broken_groups: int = Field(
        0,
        ge=0,
        description="groups of a step (and held-out questions of a validation) that may lack responses because a "
        "session of verl's failed; they teach nothing and are counted; more of them end the run",
    )
    samples_interval: int = Field(10, ge=0, description="steps between dumps into trainer.rollout_data_dir; 0: none")
    samples_prompts: int = Field(4, ge=1, description="questions of a dump, with all their responses")
    device: DeviceSettings = DeviceSettings()

    def stage(self, step: int, total_steps: int) -> int:
        """The method's stage in a step (from 1): stages share the steps of a run equally, one after the other."""
        return min((step - 1) * len(self.method.training_method.stages) // total_steps, self._last_stage)

    def dumps(self, step: int) -> bool:
        """Whether responses of a step (from 1) are dumped."""
        return bool(self.samples_interval) and (step == 1 or step % self.samples_interval == 0)

    @property
    def _last_stage(self) -> int:
        return len(self.method.training_method.stages) - 1


def verl_settings(config: Mapping[str, Any]) -> VerlSettings:
    """The section ``coca`` of a whole verl configuration, resolved into plain containers.

    Raises:
        ConfigError: one line for each problem, with key and value.
    """
    section = config.get(NAME)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{NAME}: the configuration has no such section (found {section!r}); it names the method, e.g. "
            "coca.method.name=coca, and may be empty: {}"
        )
    return checked_section(VerlSettings, section)
