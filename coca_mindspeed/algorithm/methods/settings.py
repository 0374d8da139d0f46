"""Settings of a training method (docs/method.md), declared once for the library and for every engine.

A key is a field.  Its metadata holds its description and its bounds under pydantic's names (``ge``, ``gt``, ``le``,
``lt``), so that a configuration takes these types as they are.
"""

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from coca_mindspeed.algorithm import AdvantageScale, LossAggregation
from coca_mindspeed.algorithm.methods.base import METHODS, Tensor, TrainingMethod, training_method
from coca_mindspeed.algorithm.parsing import ResponseParser, thinking_prompt

_BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}


def setting(default: Any, description: str, strict: bool | None = True, **bounds: float) -> Any:
    """A field of a method's settings; ``strict`` refuses other types of the same value, and is None for literals."""
    return dataclasses.field(default=default, metadata={"description": description, "strict": strict, **bounds})


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Settings that every method has; :func:`method_settings` makes those of a method by its name.

    A method with keys of its own has a subtype: ``class CocaMethodSettings(MethodSettings, method="coca")``.  A value
    out of its bounds and an unknown method raise a ValueError that begins with the key.

    Attributes:
        name: of the method.
        invalid_reward: confidence reward of a response without a valid confidence.
        separate_format: normalise the scores of confidences over the valid responses alone, and add the normalised 0/1
            reward of being valid.  In the paper's form (False) one invalid response among eight, with its reward of -1,
            shrinks the differences among the valid ones 5 to 40 times.  It has no effect if all responses are valid,
            and applies to methods whose confidence has a reward of its own.
        thinking: the model thinks before it answers, and its confidence is the first thing inside the thought.  The
            answer is the text behind the first ``</think>``; without one there is none, which is wrong.
        max_confidence_tokens: tokens that stand in for each confidence of an invalid response.
        confidence_decimals: digits that a confidence must have after the point; None: any plain decimal.
        advantage_scale: divisor of a group's centred rewards: its own deviation plus eps (``group``, the paper's), one
            deviation of the centred rewards of the whole step (``batch``), or 1 (``none``).  It applies to the scores
            of a confidence segment with a reward of its own, and to the one reward of another method.  Answer and
            format advantages of the former always have the group's scale.
        advantage_ddof: of the groups' deviation; 1 is the sample's, 0 the population's.
        advantage_eps: added to the groups' deviation.
        clip: epsilon of the clipped ratio.
        loss_aggregation: how the terms of the objective's tokens are added up.
    """

    _by_method: ClassVar[dict[str, "type[MethodSettings]"]] = {}
    # Pydantic's rules where a configuration holds these types.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    name: str = setting("coca", "a method of docs/method.md, or one of your own (docs/library.md)")
    thinking: bool = setting(False, "the confidence begins a thought; the answer follows </think>")
    invalid_reward: float = setting(
        -1.0, "confidence reward of an invalid response without separate_format", ge=-100, le=0
    )
    separate_format: bool = setting(True, "an advantage of its own for being valid; false: the paper's form")
    max_confidence_tokens: int = setting(16, "segment length of an invalid confidence", ge=1)
    confidence_decimals: int | None = setting(None, "exact digits after the point; null: any", ge=1, le=6)
    advantage_scale: AdvantageScale = setting(
        "group", "divisor of centred rewards: deviation of the group (the paper) or step; none: 1", strict=None
    )
    advantage_ddof: Literal[0, 1] = setting(1, "1: sample deviation, 0: population deviation", strict=None)
    advantage_eps: float = setting(1e-6, "added to the deviation of a group's rewards", ge=0, le=1)
    clip: float = setting(0.2, "epsilon of the clipped ratio", gt=0, lt=1)
    loss_aggregation: LossAggregation = setting("sum", "how token terms are added up", strict=None)

    def __init_subclass__(cls, method: str | None = None) -> None:
        """Register the settings of ``method``."""
        if method is not None:
            MethodSettings._by_method[method] = cls

    def __post_init__(self) -> None:
        """Check the method, and each value against its bounds; a configuration has checked types before."""
        if type(self) in settings_types():
            if self.name not in METHODS:
                raise ValueError(f"name: unknown training method {self.name!r}; known methods: {', '.join(METHODS)}")
            if type(self) is not settings_type(self.name):
                raise ValueError(f"name: the settings of {self.name} are {settings_type(self.name).__name__}")
        kinds = get_type_hints(type(self))
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            choices = get_args(kinds[declared.name]) if get_origin(kinds[declared.name]) is Literal else (value,)
            if value not in choices:
                raise ValueError(f"{declared.name}: expected one of {', '.join(map(str, choices))}, found {value!r}")
            for bound, (sign, holds) in _BOUNDS.items():
                if value is not None and bound in declared.metadata and not holds(value, declared.metadata[bound]):
                    raise ValueError(f"{declared.name}: expected {sign} {declared.metadata[bound]}, found {value!r}")

    @property
    def training_method(self) -> TrainingMethod:
        """The method; a name of the user's own raises ConfigError if it cannot be used."""
        return training_method(self.name)

    @property
    def label(self) -> str:
        """The method's own name, for reports."""
        return self.training_method.name

    @property
    def reads_log_probs(self) -> bool:
        """Whether :meth:`confidence_bonus` is asked for, which depends on log-probs."""
        return False

    def confidence_bonus(self, log_probs: Tensor) -> Tensor:
        """Bonus on the score of each valid confidence, float64 ``[P, G]``, as its segment's ``log_probs`` are."""
        raise NotImplementedError

    @property
    def system_prompt(self) -> str:
        """The method's system prompt; with ``thinking`` it names the place of the thought."""
        prompt = self.training_method.system_prompt
        return thinking_prompt(prompt) if self.thinking else prompt

    def parser(self, *, in_training: bool = True) -> ResponseParser:
        """The parser of this method's responses."""
        position = self.training_method.confidence_position
        return ResponseParser(position, self.confidence_decimals, self.thinking, in_training)

    def checked_stage(self, stage: int | None) -> int:
        """The index of a stage of the method, which None names if there is only one; raises ValueError."""
        stages = self.training_method.stages
        if stage is None and len(stages) == 1:
            return 0
        if stage is None or not 0 <= stage < len(stages):
            names = ", ".join(f"{index} ({name})" for index, name in enumerate(stages))
            raise ValueError(f"stage: expected an index of the stages of {self.label}, {names}; found {stage}")
        return stage


@dataclass(frozen=True, kw_only=True)
class OwnMethodSettings(MethodSettings):
    """Settings of a method that is given as an object; its name is the object's."""

    method: TrainingMethod
    name: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.method.name)
        super().__post_init__()

    @property
    def training_method(self) -> TrainingMethod:
        return self.method


def settings_type(name: str) -> type[MethodSettings]:
    """The type of a method's settings."""
    return MethodSettings._by_method.get(name, MethodSettings)


def settings_types() -> tuple[type[MethodSettings], ...]:
    """The types of all methods' settings, the common one first."""
    return MethodSettings, *MethodSettings._by_method.values()


def keys_of_others(name: object) -> dict[str, Any]:
    """Defaults of the keys that settings of other methods have, and those of the method ``name`` have not."""
    every = {one.name: one.default for kind in settings_types() for one in dataclasses.fields(kind)}
    return {key: default for key, default in every.items() if key not in _keys(settings_type(str(name)))}


def without_keys_of_others(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """``keys`` without those that only other methods' settings have, at their defaults.

    Raises ValueError, which begins with the key, if such a key has another value.
    """
    kept = dict(keys)
    for key, default in keys_of_others(name).items():
        if key in kept and (value := kept.pop(key)) != default:
            owners = ", ".join(method for method, kind in MethodSettings._by_method.items() if key in _keys(kind))
            raise ValueError(f"{key}: is a setting of {owners} only, found {value} with name={name}")
    return kept


def _keys(kind: type[MethodSettings]) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def method_settings(name: str | TrainingMethod = "coca", **keys: Any) -> MethodSettings:
    """The settings of a method by its name, or of an object; ``keys`` differ from the defaults.

    Raises ValueError, which begins with the key, for an unknown method, a value out of its bounds, or another method's
    key that is not at its default; TypeError for a key that no method has.
    """
    if isinstance(name, str):
        return settings_type(name)(name=name, **without_keys_of_others(name, keys))
    return OwnMethodSettings(method=name, **without_keys_of_others(name.name, keys))
