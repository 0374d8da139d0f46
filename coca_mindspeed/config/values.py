"""Facts that the schema declares at its keys, types of the values that it checks by functions, and the check of a
custom training method.
"""

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, PlainSerializer, PlainValidator, TypeAdapter
from pydantic.fields import FieldInfo

from coca_mindspeed.algorithm.methods import METHODS, OTHER_NAMES, MethodSettings, TrainingMethod
from coca_mindspeed.algorithm.methods.settings import settings_type, settings_types, without_keys_of_others
from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.errors import ConfigError, did_you_mean
from coca_mindspeed.utils.custom_code import is_custom, load_custom, pinned

#: Whether a resumed run may change a key: ``same``: no, it is part of the run's identity; ``cluster``: on a cluster
#: only; ``free``: yes; ``length``: yes, if the steps taken do not depend on it; ``memory``: yes, it bounds memory.
Resume = Literal["same", "cluster", "free", "length", "memory"]
#: The local engine, the engines on MindSpeed-RL and on verl, and the integrations.
Engine = Literal["local", "mindspeed_rl", "verl", "trl", "ms_swift", "slime"]


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Facts about a key for the engines and for a resumed run, declared as ``Annotated[TYPE, KeyFacts(...)]``.

    The facts of a section hold for its keys, except where they have their own.

    Attributes:
        resume: whether a resumed run may change it.
        instead: the engines that have the key but do not read it, and what to do there, or why.
        keys: facts of keys of this section whose type cannot hold them.
    """

    resume: Resume = "same"
    instead: Mapping[Engine, str] = field(default_factory=dict)
    keys: Mapping[str, "KeyFacts"] = field(default_factory=dict)


_DEFAULT = KeyFacts()


def local_only(instead: str, resume: Resume = "same") -> KeyFacts:
    """Facts of a run's key that the local engine alone reads; ``instead`` says what to do on a cluster."""
    return KeyFacts(resume, {"mindspeed_rl": instead})


#: A section of a configuration.
Section = type[BaseModel] | type[MethodSettings]


def is_section(annotation: object) -> TypeGuard[Section]:
    """Whether a key of this type is a section with keys of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel | MethodSettings)


def fields_of(section: Section) -> dict[str, FieldInfo]:
    """The keys of a section; of a method's settings, those of every method."""
    if issubclass(section, BaseModel):
        return section.model_fields
    return {
        declared.name: FieldInfo.from_annotated_attribute(get_type_hints(kind)[declared.name], declared)
        for kind in settings_types()
        for declared in dataclasses.fields(kind)
    }


def facts_of(schema: Section, inherited: KeyFacts = _DEFAULT, above: str = "") -> dict[str, KeyFacts]:
    """The facts of every key of a schema, sections included, by dotted name."""
    facts = {}
    for name, declared in fields_of(schema).items():
        of_section = inherited.keys.get(name, replace(inherited, keys={}))
        of_key = next((fact for fact in declared.metadata if isinstance(fact, KeyFacts)), of_section)
        facts[f"{above}{name}"] = of_key
        for kind in (declared.annotation, *get_args(declared.annotation)):
            if is_section(kind):
                facts |= facts_of(kind, of_key, f"{above}{name}.")
    return facts


def fact_of(facts: Mapping[str, KeyFacts], key: str) -> KeyFacts:
    """The facts of a key, or of the nearest section above it: free-form sections and lists have keys of their own."""
    while key not in facts and "." in key:
        key = key.rpartition(".")[0]
    return facts.get(key, _DEFAULT)


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

    Raises ConfigError: it cannot be imported, or an attribute is missing or wrong.
    """
    method = load_custom(name)
    try:
        method = method() if isinstance(method, type) else method
    except Exception as error:  # the user's own code
        raise ConfigError(f"{name}: cannot be made without arguments: {type(error).__name__}: {error}") from error
    positions = get_args(ConfidencePosition)
    has_position = getattr(method, "confidence_position", None) in positions  # on which the system prompt may depend
    stages, label = getattr(method, "stages", None), getattr(method, "name", None)
    named = isinstance(stages, tuple) and stages and all(isinstance(stage, str) for stage in stages)
    for attribute, holds, expected in (
        ("name", isinstance(label, str) and label and label not in METHODS, f"a name other than {', '.join(METHODS)}"),
        ("confidence_position", has_position, " or ".join(positions)),
        ("system_prompt", has_position and isinstance(getattr(method, "system_prompt", None), str), "a text"),
        ("stages", named, "names in a tuple"),
        ("advantages", callable(getattr(method, "advantages", None)), "a method"),
    ):
        if not holds:
            hint = "see docs/library.md; a class on one of the bases needs @dataclass(frozen=True) of its own"
            found = getattr(method, attribute, "none")
            raise ConfigError(f"{name}: its {attribute} should be {expected}, found {found!r:.80}; {hint}")
    checked: TrainingMethod = method
    return checked


@dataclass(frozen=True, kw_only=True)
class CustomMethodSettings(MethodSettings):
    """Settings of a method of the user's own, by :func:`pinned` name."""

    @property
    def training_method(self) -> TrainingMethod:
        return custom_method(self.name)


def checked_method(value: object) -> MethodSettings:
    """The settings of the method that a section names; ``coca`` if it names none.

    Raises ValueError, which begins with the key, or pydantic's errors under the section's keys.
    """
    if isinstance(value, MethodSettings):
        return value
    name = value.get("name", "coca") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str):
        return TypeAdapter(MethodSettings).validate_python(value)
    if is_custom(name):
        try:
            name = pinned(name)
        except ValueError as error:
            raise ValueError(f"name: {error}") from error
    elif name not in METHODS:
        near = did_you_mean(OTHER_NAMES.get(name.lower(), name), METHODS)
        raise ValueError(f"name: unknown training method {name!r}{near}; known methods: {', '.join(METHODS)}")
    kind = CustomMethodSettings if is_custom(name) else settings_type(name)
    return TypeAdapter(kind).validate_python({**without_keys_of_others(name, value), "name": name})


#: The section ``method``: the type of its settings follows from its name.
Method = Annotated[MethodSettings, PlainValidator(checked_method), PlainSerializer(dataclasses.asdict)]
FreeForm = Annotated[dict[str, Any], AfterValidator(_finite)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(template_variables)]
Day = Annotated[str | None, AfterValidator(template_day)]
ColumnNames = Annotated[dict[str, str], AfterValidator(column_names)]
Pattern = Annotated[str, AfterValidator(regular_expression)]
GraderName = Annotated[str, AfterValidator(grader_name)]
