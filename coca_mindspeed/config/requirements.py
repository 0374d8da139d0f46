"""Requirements on a configuration: tables of rows, and their one reader.

An engine lists the keys of its upstream that would change the method, its sampling or its batches, or that have no
effect.  A row holds constants, or a test where the accepted values follow from other keys.  Rows of constants are in a
YAML file beside the table.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeGuard, TypeVar

from coca_mindspeed.errors import Check, Problem, show_value
from coca_mindspeed.utils.text_formats import value_of

Subject = TypeVar("Subject")
_ABSENT = object()


@dataclass(frozen=True)
class View:
    """An upstream's composed configuration by dotted keys."""

    values: Mapping[str, Any]  # nested
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # the upstream's, by dotted key; None if not listed

    def value(self, key: str) -> Any:
        """The value of a key, or the upstream's default if it is absent or null."""
        value = value_of(self.values, self.place(key))
        return self.DEFAULTS.get(key) if value is None else value

    def sets(self, key: str) -> bool:
        """Whether the configuration has the key, be it null."""
        return value_of(self.values, self.place(key), _ABSENT) is not _ABSENT

    def place(self, key: str) -> str:
        """The full key; of a key that may stand in several sections, the one that the upstream reads."""
        return key


@dataclass(frozen=True)
class Requirement(Generic[Subject]):
    """A key and the values that it may have; the subject is a :class:`View`, or an object with dotted attributes."""

    code: str  # of the problem
    key: str  # dotted
    accepts: tuple[Any, ...] | Callable[[Any, Subject], object]  # values, or a test of the value and the subject
    because: str | Callable[[Subject], str]  # the reason; of a test, the whole condition: "must divide ..."
    fix: str | Callable[[Subject], str] = ""
    when: Callable[[Subject], object] = lambda subject: True  # else the row does not apply
    optional: bool = False  # null or absent is accepted
    effect: Literal["read", "none"] = "read"  # of the key; without one, an absent key is accepted

    def problem(self, subject: Subject) -> Problem | None:
        """Why the subject does not meet the requirement."""
        if not self.when(subject):
            return None
        value = _value(subject, self.key)
        if self._accepted(value, subject):
            return None
        key = subject.place(self.key) if isinstance(subject, View) else self.key
        fix = self.fix if isinstance(self.fix, str) else self.fix(subject)
        return Problem(self.code, key, value, self._expected(subject), fix)

    def _accepted(self, value: Any, subject: Subject) -> bool:
        if self.optional and value is None:
            return True
        if callable(self.accepts):
            return bool(self.accepts(value, subject))
        if self.effect == "none" and isinstance(subject, View) and not subject.sets(self.key):
            return True
        return any(_same(value, accepted) for accepted in self.accepts)

    def _expected(self, subject: Subject) -> str:
        because = self.because if isinstance(self.because, str) else self.because(subject)
        if callable(self.accepts):
            return because
        if self.effect == "none" and not self.accepts:
            return f"has no effect: {because}"
        shown = " or ".join(map(show_value, self.accepts))
        because = f"it has no effect: {because}" if self.effect == "none" else because
        return f"must be {shown or 'absent'}: {because}"


def constant_rows(
    groups: Sequence[Mapping[str, Any]], conditions: Mapping[str, Callable[[Any], object]] | None = None
) -> Iterator[Requirement[Any]]:
    """The rows of a YAML table: groups with ``code``, ``because`` and ``keys``, the accepted values by key.

    A group may be ``optional``; keys of the codes ``no-effect`` and ``ignored-key`` are, and have no effect.  ``when``
    names one of ``conditions``.
    """
    for group in groups:
        code, without_effect = group["code"], group["code"] in ("no-effect", "ignored-key")
        when = (conditions or {})[group["when"]] if "when" in group else lambda subject: True
        for key, accepted in group["keys"].items():
            yield Requirement(
                code,
                key,
                tuple(accepted),
                group["because"],
                when=when,
                optional=without_effect or group.get("optional", False),
                effect="none" if without_effect else "read",
            )


class KeyClasses(NamedTuple):
    """The class of each key of an upstream.

    Attributes:
        readers: each key, and the function of the upstream that reads it in our runs; None: nothing does so.
        rows: keys with requirements, and whether the upstream reads them (``effect``).
        shown: keys that we read and that may have any value.
        set_by_us: keys that the run sets.
    """

    readers: Mapping[str, str | None]
    rows: Mapping[str, str]
    shown: frozenset[str]
    set_by_us: frozenset[str]

    def of(self, key: str) -> Literal["read", "set", "none", "upstream"]:
        """``read`` by us, ``set`` by us, without effect (``none``), or the ``upstream``'s own."""
        if key in self.set_by_us:
            return "set"
        if key in self.rows or key in self.shown:
            return "none" if self.rows.get(key) == "none" else "read"
        return "none" if self.readers.get(key, "") is None else "upstream"


def effects(*tables: Sequence[Requirement[Any]]) -> dict[str, str]:
    """The keys of tables, and whether their upstream reads them: one row that says so decides."""
    rows = [row for table in tables for row in table]
    return {row.key: row.effect for row in sorted(rows, key=lambda row: row.effect == "read")}


def required(rows: Sequence[Requirement[Subject]]) -> Check[Subject]:
    """A check that yields a problem for each row that its subject does not meet, in the order of the table."""

    def check(subject: Subject) -> Iterator[Problem]:
        yield from filter(None, (row.problem(subject) for row in rows))

    return check


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(subject: Any, key: str) -> Any:
    return subject.value(key) if isinstance(subject, View) else attrgetter(key)(subject)


def _same(value: Any, accepted: Any) -> bool:
    """Equality of type and value: true is not 1; an integer may stand for a number."""
    if is_number(accepted):
        return is_number(value) and math.isclose(value, accepted, rel_tol=1e-12)
    return type(value) is type(accepted) and bool(value == accepted)
