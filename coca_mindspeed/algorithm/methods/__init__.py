"""The training methods: rewards of the segments, and the response format.

Configurations name the methods of this package, so it imports torch, which takes seconds, only to compute with it.
"""

from coca_mindspeed.algorithm.methods.base import METHODS, TrainingMethod, training_method
from coca_mindspeed.algorithm.methods.caliber import Caliber
from coca_mindspeed.algorithm.methods.coca import Coca, CocaMethodSettings, Gdpo
from coca_mindspeed.algorithm.methods.dcpo import Dcpo
from coca_mindspeed.algorithm.methods.log_score import LogScore
from coca_mindspeed.algorithm.methods.one_reward import Joint, Rlcr, Rlvr, Sequential
from coca_mindspeed.algorithm.methods.settings import MethodSettings, method_settings

__all__ = [
    "METHODS",
    "OTHER_NAMES",
    "CocaMethodSettings",
    "MethodSettings",
    "TrainingMethod",
    "method_settings",
    "training_method",
]

_OURS: tuple[TrainingMethod, ...] = (
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
METHODS.update((method.name, method) for method in _OURS)
#: Names of methods elsewhere, for messages: GRPO with the reward of a right answer alone, the logarithmic score.
OTHER_NAMES = {"grpo": "rlvr", "rewarding_doubt": "log_score"}
