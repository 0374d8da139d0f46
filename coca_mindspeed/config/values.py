"""Facts that the schema declares at its keys, types of the values that it checks by functions, and the check of a
custom training method.
"""

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel

from coca_mindspeed.algorithm.methods import METHODS, TrainingMethod
from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.errors import ConfigError, did_you_mean
from coca_mindspeed.utils.custom_code import is_custom, load_custom, pinned

#: Whether a resumed run may change a key: ``same``: no, it is part of the run's identity; ``cluster``: on a cluster
#: only; ``free``: yes; ``length``: yes, if the steps taken do not depend on it; ``memory``: yes, it bounds memory.
Resume = Literal["same", "cluster", "free", "length", "memory"]
#: The local engine, the engines on MindSpeed-RL and on verl, and the integrations.
Engine = Literal["local", "mindspeed_rl", "verl", "trl", "ms_swift"]


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Facts about a key for the engines and for a resumed run, declared as ``Annotated[TYPE, KeyFacts(...)]``.

    The facts of a section hold for its keys, except where they have their own.

    Attributes:
        resume: whether a resumed run may change it.
        instead: the engines that have the key but do not read it, and what to do there, or why.
    """

    resume: Resume = "same"
    instead: Mapping[Engine, str] = field(default_factory=dict)


_DEFAULT = KeyFacts()


def local_only(instead: str, resume: Resume = "same") -> KeyFacts:
    """Facts of a run's key that the local engine alone reads; ``instead`` says what to do on a cluster."""
    return KeyFacts(resume, {"mindspeed_rl": instead})


def facts_of(schema: type[BaseModel], inherited: KeyFacts = _DEFAULT, above: str = "") -> dict[str, KeyFacts]:
    """The facts of every key of a schema, sections included, by dotted name."""
    found = {}
    for name, declared in schema.model_fields.items():
        own = next((each for each in declared.metadata if isinstance(each, KeyFacts)), inherited)
        found[f"{above}{name}"] = own
        for kind in (declared.annotation, *get_args(declared.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= facts_of(kind, own, f"{above}{name}.")
    return found


def fact_of(known: Mapping[str, KeyFacts], key: str) -> KeyFacts:
    """The facts of a key, or of the nearest section above it: free-form sections and lists have keys of their own."""
    while key not in known and "." in key:
        key = key.rpartition(".")[0]
    return known.get(key, _DEFAULT)


def unread_keys(schema: type[BaseModel], engine: Engine) -> dict[str, str]:
    """The keys of a schema that an engine does not read, and what to do there instead, or why."""
    return {key: facts.instead[engine] for key, facts in facts_of(schema).items() if engine in facts.instead}


def keys_of_identity(schema: type[BaseModel]) -> set[str]:
    """The keys of a schema, or its sections as a whole, that a resumed run must have as before on a cluster."""
    same = {key for key, facts in facts_of(schema).items() if facts.resume == "same"}
    return {key for key in same if key.rpartition(".")[0] not in same}


# transformers gives these a value in every template, so that a variable of the same name would have no effect.
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a free-form section contains no NaN or infinity."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{place}: should be a finite number, found {value}")
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}.{index}", inner) for index, inner in enumerate(value)]
    return values


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a chat template: names that a template can use, finite numbers."""
    for name in values:
        if not name.isidentifier() or name in _RESERVED_VARIABLES:
            raise ValueError(f"{name}: expected the name of a variable of the chat template")
    return _finite(values)


def template_day(value: str | None) -> str | None:
    """Check a date for a chat template."""
    try:
        if value is not None and datetime.date.fromisoformat(value).isoformat() != value:
            raise ValueError
    except ValueError:
        raise ValueError(f"expected a date, YYYY-MM-DD, found {value!r}") from None
    return value


def regular_expression(value: str) -> str:
    """Check a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"expected a regular expression, found {value!r:.80}: {error}") from error
    return value


def grader_name(value: str) -> str:
    """Add the fingerprint to the file of a custom grader."""
    return pinned(value) if is_custom(value) else value


_FIELDS = ("id", "dataset", "category", "question", "answer", "system", "metadata", "messages")


def column_names(values: dict[str, str]) -> dict[str, str]:
    """Check a mapping of the fields of a record, or ``messages``, to columns."""
    for name in values:
        if name not in _FIELDS:
            raise ValueError(f"{name}: no such field{did_you_mean(name, _FIELDS)}; expected {', '.join(_FIELDS)}")
    if values and "messages" not in values and not {"question", "answer"} <= set(values):
        raise ValueError("expected columns of question and answer, or of messages")
    return values


@cache
def custom_method(name: str) -> TrainingMethod:
    """The instance, or the instance of the class, that ``name`` (:func:`pinned`) names.

    Raises:
        ConfigError: it cannot be imported, or an attribute is missing or wrong.
    """
    method = load_custom(name)
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
            hint = "see docs/library.md; a class on one of the bases needs @dataclass(frozen=True) of its own"
            found = getattr(method, attribute, "none")
            raise ConfigError(f"{name}: its {attribute} should be {expected}, found {found!r:.80}; {hint}")
    checked: TrainingMethod = method
    return checked


FreeForm = Annotated[dict[str, Any], AfterValidator(_finite)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(template_variables)]
Day = Annotated[str | None, AfterValidator(template_day)]
ColumnNames = Annotated[dict[str, str], AfterValidator(column_names)]
Pattern = Annotated[str, AfterValidator(regular_expression)]
GraderName = Annotated[str, AfterValidator(grader_name)]
