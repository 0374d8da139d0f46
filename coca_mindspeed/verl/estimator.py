"""The advantage estimator ``coca``: hands verl the advantages that our trainer has computed.

An estimator of verl's sees rewards and masks, but neither the responses nor what the reward manager found in them, so
it cannot compute ours.  The trainer leaves them here for the length of one call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.verl.settings import NAME

_waiting: list[Tensor] = []


@contextmanager
def handing_over(advantages: Tensor) -> Iterator[None]:
    """Have the next call of the estimator return ``advantages``, float ``[rows, tokens]``.

    Raises:
        TrainingError: nobody called it.
    """
    _waiting.append(advantages)
    try:
        yield
        if _waiting:
            raise TrainingError(f"verl did not ask the estimator {NAME!r} for advantages; algorithm.adv_estimator?")
    finally:
        _waiting.clear()


def waiting_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **_others: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and, as there is no critic, returns that equal them: float ``[rows, tokens]`` both.

    Raises:
        TrainingError: called by a trainer that is not ours.
    """
    if not _waiting:
        raise TrainingError(
            f"algorithm.adv_estimator={NAME} needs trainer.v1.trainer_mode={NAME}: the advantages of a segment are "
            "computed by that trainer, which knows the groups and what was found in their responses"
        )
    advantages = _waiting.pop()
    if advantages.shape != response_mask.shape:
        raise TrainingError(
            f"advantages {tuple(advantages.shape)} for responses {tuple(response_mask.shape)} [rows, tokens]"
        )
    advantages = advantages * response_mask
    return advantages, advantages


register_adv_est(NAME)(waiting_advantages)
