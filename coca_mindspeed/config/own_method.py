"""A training method of the user's own, checked against :class:`TrainingMethod`."""

from dataclasses import is_dataclass
from functools import cache
from typing import get_args

from coca_mindspeed.algorithm.methods import METHODS, TrainingMethod
from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.own_code import load_own


@cache
def own_method(name: str) -> TrainingMethod:
    """The instance, or the instance of the class, that ``name`` (:func:`pinned`) names.

    Raises:
        ConfigError: it cannot be imported, or an attribute is missing or wrong.
    """
    method = load_own(name)
    try:
        method = method() if isinstance(method, type) else method
    except Exception as error:  # the user's own code
        raise ConfigError(f"{name}: cannot be made without arguments: {type(error).__name__}: {error}") from error
    positions = get_args(ConfidencePosition)
    stages, label = getattr(method, "stages", None), getattr(method, "name", None)
    named = isinstance(stages, tuple) and stages and all(isinstance(stage, str) for stage in stages)
    for attribute, holds, expected in (
        ("name", isinstance(label, str) and label and label not in METHODS, f"a name other than {', '.join(METHODS)}"),
        ("system_prompt", isinstance(getattr(method, "system_prompt", None), str), "a text"),
        ("confidence_position", getattr(method, "confidence_position", None) in positions, " or ".join(positions)),
        ("stages", named, "names in a tuple"),
        ("advantages", callable(getattr(method, "advantages", None)), "a method"),
    ):
        if not holds:
            found = getattr(method, attribute, "none")
            hint = "see docs/library.md"
            if (
                is_dataclass(method)
                and attribute in vars(type(method))
                and "__dataclass_fields__" not in vars(type(method))
            ):
                hint = "a class on one of the bases needs @dataclass(frozen=True) of its own"
            raise ConfigError(f"{name}: its {attribute} should be {expected}, found {found!r:.80}; {hint}")
    checked: TrainingMethod = method
    return checked
