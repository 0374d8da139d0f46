"""What this project adds to a verl configuration: the section ``coca``, checked and typed.

Everything else in the file is verl's own; :mod:`.required_keys` says which of it the method depends on.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.schema import ArchitectureConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.judging.judging_settings import EngineSection, JudgingSettings, checked_section

#: The name of our trainer, reward manager and advantage estimator in verl's registries.
NAME = "coca"


class DeviceSettings(EngineSection):
    """Only for the plan that ``coca-mindspeed check`` prints."""

    memory_gib: float = Field(80.0, gt=0, description="memory of one GPU or NPU")
    architecture: ArchitectureConfig | None = Field(
        None, description="the model's shape; null: read from the config.json of a model that is on this machine"
    )


class VerlSettings(JudgingSettings):
    """The section ``coca``."""

    broken_groups: int = Field(
        0,
        ge=0,
        description="groups of a step (and held-out questions of a validation) that may lack responses because a "
        "session of verl's failed; they teach nothing and are counted; more of them end the run",
    )
    device: DeviceSettings = DeviceSettings()

    def credit_rule(self, stage: int) -> CreditRule:
        """How the rewards of a stage become advantages."""
        return self.method.credit_rule(stage)

    def stage(self, step: int, total_steps: int) -> int:
        """The method's stage in a step (from 1): stages share the steps of a run equally, one after the other."""
        return min((step - 1) * len(self.method.training_method.stages) // total_steps, self._last_stage)

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
