"""Facts about a configuration key that are declared at the key, and the check of a resumed run that they decide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel

from coca_mindspeed.errors import ConfigError, Problem
from coca_mindspeed.utils.text_formats import differences

#: Whether a resumed run may change a key: ``same``: no, it is part of the run's identity; ``cluster``: on a cluster
#: only; ``free``: yes; ``length``: yes, if the steps taken do not depend on it; ``memory``: yes, it bounds memory.
Resume = Literal["same", "cluster", "free", "length", "memory"]


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Facts about a key for the engines and for a resumed run, declared as ``Annotated[TYPE, KeyFacts(...)]``.

    The facts of a section hold for its keys, except where they have their own.

    Attributes:
        resume: whether a resumed run may change it.
        cluster: what to do on a cluster instead, for a key of the local engine alone; empty: every engine reads it.
    """

    resume: Resume = "same"
    cluster: str = ""


_DEFAULT = KeyFacts()


def facts_of(schema: type[BaseModel], inherited: KeyFacts = _DEFAULT, above: str = "") -> dict[str, KeyFacts]:
    """The facts of every key of a schema, sections included, by dotted name."""
    found = {}
    for name, field in schema.model_fields.items():
        own = next((each for each in field.metadata if isinstance(each, KeyFacts)), inherited)
        found[f"{above}{name}"] = own
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= facts_of(kind, own, f"{above}{name}.")
    return found


def fact_of(known: Mapping[str, KeyFacts], key: str) -> KeyFacts:
    """The facts of a key, or of the nearest section above it: free-form sections and lists have keys of their own."""
    while key not in known and "." in key:
        key = key.rpartition(".")[0]
    return known.get(key, _DEFAULT)


def check_same_run(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: object,
    fix: str,
    may_change: Callable[[str], bool] = lambda key: False,
) -> None:
    """Raise ConfigError for each setting in which a resumed run differs from the run before.

    ``where`` names the file with the settings ``before``, ``fix`` says what to do.
    """
    changed = [each for each in differences(before, now) if not may_change(each[0])]
    if changed:
        lines = (f"{where}: the run to resume has {key}={then!r}, found {found!r}" for key, then, found in changed)
        problems = [Problem("another-run", key, found, f"must be {then!r}", fix) for key, then, found in changed]
        raise ConfigError("\n".join(lines) + f"; {fix}", problems)
