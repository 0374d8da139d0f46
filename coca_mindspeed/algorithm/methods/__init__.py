"""The training methods: rewards of the segments, and the response format.

Configurations name the methods of this package, so it imports torch, which takes seconds, only to compute with it.
"""

from coca_mindspeed.algorithm.methods.base import TrainingMethod
from coca_mindspeed.algorithm.methods.caliber import Caliber
from coca_mindspeed.algorithm.methods.coca import Coca, Gdpo
from coca_mindspeed.algorithm.methods.dcpo import Dcpo
from coca_mindspeed.algorithm.methods.log_score import LogScore
from coca_mindspeed.algorithm.methods.one_reward import Joint, Rlcr, Rlvr, Sequential

__all__ = ["METHODS", "OTHER_NAMES", "TrainingMethod", "training_method"]

_METHODS: tuple[TrainingMethod, ...] = (
    Coca(),
    Rlvr(),
    Joint(),
    Sequential(),
    Rlcr(),
    Dcpo(),
    LogScore(),
    Gdpo(),
    Caliber(),
)
METHODS: dict[str, TrainingMethod] = {method.name: method for method in _METHODS}
#: Names of methods elsewhere, for messages: GRPO with the reward of a right answer alone, the logarithmic score.
OTHER_NAMES = {"grpo": "rlvr", "rewarding_doubt": "log_score"}


def training_method(name: str) -> TrainingMethod:
    """Return the method called ``name``; raise ``ValueError`` if there is none."""
    if name not in METHODS:
        raise ValueError(f"unknown training method {name!r}; known methods: {', '.join(METHODS)}")
    return METHODS[name]
