"""Who samples a step's responses: the policy itself, or another engine that is given its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from coca_mindspeed.config.schema import RolloutConfig
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Samples, sample_responses
from coca_mindspeed.local.token_draw import NoDistributionError


class RolloutError(TrainingError):
    """The engine that samples has failed or is gone."""


class Rollout(Protocol):
    """Samples from the policy as it is at that moment, whoever computes it."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        rollout: RolloutConfig,
        *,
        group_size: int,
        generator: torch.Generator,
    ) -> Samples:
        """Sample ``group_size`` responses to each prompt.

        Args:
            prompts: token ids of each.
            rollout: length limit, temperature, how many at once.
            group_size: G.
            generator: the only source of randomness.

        Raises:
            RolloutError: the engine has failed.
        """

    def weights_changed(self) -> None:
        """The policy has been updated; what is sampled from now on is sampled from its new weights."""

    def timing(self) -> dict[str, float]:
        """What it has taken since it was last asked, by the names of ``timing.jsonl``."""

    def close(self) -> None:
        """Give back what it holds; more than once is no harm."""


@dataclass(frozen=True)
class LocalRollout:
    """The policy itself: nothing to hand over, and the log-probs are its own."""

    policy: Policy

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        rollout: RolloutConfig,
        *,
        group_size: int,
        generator: torch.Generator,
    ) -> Samples:
        try:
            return sample_responses(
                self.policy,
                prompts,
                group_size=group_size,
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                generator=generator,
                batch_responses=rollout.batch_responses,
            )
        except NoDistributionError as error:
            raise RolloutError(f"no token can be drawn from the policy: {error}; are its weights finite?") from error

    def weights_changed(self) -> None:
        """Nothing holds a copy of them."""

    def timing(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""
