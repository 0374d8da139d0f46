"""Errors that are meant for the user, and the problems that checks report.

The command line prints them without a traceback.  Every message says where (file, line or key), what was found,
what was expected and, where it is known, what to do.

A check is a function of its subject (a run, a resolved configuration) that yields problems; most are rows of
:mod:`coca_mindspeed.config.requirements`.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

Subject = TypeVar("Subject")
Check = Callable[[Subject], Iterable["Problem"]]
UNKNOWN_KEY = "extra_forbidden"  # code of pydantic
_CODES_OF_DATACLASSES = {"unexpected_keyword_argument": UNKNOWN_KEY, "dataclass_type": "model_type"}
_LONGEST_VALUE = 200  # characters of a value in a message


def did_you_mean(name: str, candidates: Iterable[str], similarity: float = 0.6) -> str:
    """Return ``, did you mean 'x'?`` if one of ``known`` is similar, else an empty string.

    Of dotted names the last part is compared, of options the name without dashes; all names that share the nearest one
    are returned, and all that are as near.  A name of several words is also compared by its initials: ``learning_rate``
    is ``lr``.
    """
    names: dict[str, list[str]] = {}
    for each in candidates:
        names.setdefault(str(each).rpartition(".")[2].lstrip("-"), []).append(str(each))
    name = name.lstrip("-")
    same = [last for last in names if last in (name, _initials(name)) or _initials(last) == name]
    close = same or difflib.get_close_matches(name, names, n=3, cutoff=similarity)
    # All that are equally near: of two machines, a guess would name the wrong one.
    nearest = same[:1] or [each for each in close if _similarity(each, name) == _similarity(close[0], name)]
    found = [each for last in nearest for each in names[last]]
    return f", did you mean {' or '.join(map(repr, found))}?" if found else ""


def _similarity(candidate: str, name: str) -> float:
    return difflib.SequenceMatcher(None, candidate, name).ratio()


def _initials(name: str) -> str | None:
    """The initials of a name of several words."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else None


class Problem(NamedTuple):
    """Why a run or a machine is refused."""

    code: str  # name of the check; it does not change when a message is rewritten
    key: str  # dotted configuration key, or the item of a machine
    value: Any  # the value found
    expected: str  # the condition, as a phrase
    fix: str = ""  # what to do about it, if known

    def __str__(self) -> str:
        value = "" if isinstance(self.value, dict) else f"={show_value(self.value)}"
        first = f"{self.key}{value}: {self.expected} [{self.code}]"
        return f"{first}\n    {self.fix}" if self.fix else first


class CocaError(Exception):
    """Base of every error that this project raises on purpose for the user to read."""

    exit_code = 1


class ConfigError(CocaError):
    """A configuration file or an override cannot be used; ``problems`` lists the reasons if they were collected."""

    def __init__(self, message: str, problems: Collection[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)


class UsageError(ConfigError):
    """Invalid command line: a contradiction, an unknown name, a value out of range."""

    exit_code = 2


class DataError(CocaError):
    """A data file has invalid contents; the message names the file and the line."""


class GradingError(CocaError):
    """Answers cannot be graded as asked (an unknown grader, no sandbox, no endpoint)."""


class TrainingError(CocaError):
    """Training cannot go on; the message names the step and the last good checkpoint."""


class MissingDependencyError(CocaError):
    """An optional package is not installed; the message says which and how to get it."""


def find_problems(subject: Subject, *groups: Sequence[Check[Subject]]) -> list[Problem]:
    """Run groups of checks, cheap ones first; a group runs only if the groups before it found nothing.

    The first problem of a key is kept.
    """
    problems: dict[str, Problem] = {}
    for group in groups:
        for check in group:
            for problem in check(subject):
                problems.setdefault(problem.key, problem)
        if problems:
            break
    return list(problems.values())


def raise_problems(problems: Collection[Problem], title: str = "", *, usage: bool = False) -> None:
    """Raise :class:`ConfigError` (``usage``: :class:`UsageError`) with all problems, if there are any."""
    if problems:
        lines = [title] if title else []
        raise (UsageError if usage else ConfigError)("\n".join([*lines, *map(str, problems)]), problems)


def problems_of(error: CocaError, code: str, key: str, value: Any = None) -> list[Problem]:
    """The problems that an error carries, or the error itself as a problem of ``key``."""
    return list(getattr(error, "problems", ())) or [Problem(code, key, value, str(error))]


def show_value(value: Any) -> str:
    """A value as YAML writes it, shortened; text is quoted."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        shown = repr(str(value)) if isinstance(value, Path) else repr(value)
    except ValueError:
        return "a number of more than 4300 digits"
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}..."


def validation_problems(error: "ValidationError", section: str = "") -> list[Problem]:
    """The errors of pydantic as problems, under dotted keys below ``section``.

    A validator of ours names the key below its section at the start of its message: ``key: reason``.
    """
    from coca_mindspeed.utils.text_formats import value_of  # needs PyYAML

    problems = []
    for found in error.errors():
        parts = [section, *map(str, found["loc"])]
        message = found["msg"].removeprefix("Value error, ")
        value = None if found["type"] == "missing" else found["input"]
        if found["type"] == "value_error":
            inner, separator, reason = message.partition(": ")
            if separator and inner.replace(".", "").replace("_", "").isalnum():
                parts, message = [*parts, inner], reason
                value = value_of(value, inner)
        key = ".".join(part for part in parts if part)
        code = _CODES_OF_DATACLASSES.get(found["type"], found["type"])
        problems.append(Problem(code, key, value, f"{message[:1].lower()}{message[1:]}"))
    return problems
