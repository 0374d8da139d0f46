"""CoCA: GRPO that trains a language model to state calibrated confidence before it answers.

Importing the package needs neither torch nor Ray nor MindSpeed-RL nor an accelerator: the names of ``__all__`` import
their modules on first use.  docs/library.md shows how to use them; docs/architecture.md lists the modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coca_mindspeed.algorithm.advantages import SegmentMasks
    from coca_mindspeed.algorithm.boundary import confidence_segment_lengths, segment_ends
    from coca_mindspeed.algorithm.credit import CreditRule
    from coca_mindspeed.algorithm.methods import method_settings, training_method
    from coca_mindspeed.algorithm.objective import segment_objective
    from coca_mindspeed.algorithm.parsing import parse_response
    from coca_mindspeed.library import CocaAdvantages, coca_advantages
    from coca_mindspeed.utils.tokenization import token_text

__version__ = "0.3.0"

__all__ = [
    "CocaAdvantages",
    "CreditRule",
    "SegmentMasks",
    "coca_advantages",
    "confidence_segment_lengths",
    "method_settings",
    "parse_response",
    "segment_ends",
    "segment_objective",
    "token_text",
    "training_method",
]

_MODULES = {
    "CocaAdvantages": "library",
    "CreditRule": "algorithm.credit",
    "SegmentMasks": "algorithm.advantages",
    "coca_advantages": "library",
    "confidence_segment_lengths": "algorithm.boundary",
    "method_settings": "algorithm.methods",
    "parse_response": "algorithm.parsing",
    "segment_ends": "algorithm.boundary",
    "segment_objective": "algorithm.objective",
    "token_text": "utils.tokenization",
    "training_method": "algorithm.methods",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
