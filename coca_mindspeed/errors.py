"""Errors that are meant for the user.

The command line prints them without a traceback.  Every message says where (file, line or key), what was found,
what was expected and, where it is known, what to do.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coca_mindspeed.config.checks import Problem


def nearest(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """Return ``, did you mean 'x'?`` if one of ``known`` is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f", did you mean {close[0]!r}?" if close else ""


class CocaError(Exception):
    """Base of every error that this project raises on purpose for the user to read."""

    exit_code = 1


class ConfigError(CocaError):
    """A configuration file or an override cannot be used; ``problems`` lists the reasons if they were collected."""

    def __init__(self, message: str, problems: "Collection[Problem]" = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)


class UsageError(ConfigError):
    """The command line asks for what cannot be: a contradiction, an unknown name, a value out of range."""

    exit_code = 2


class DataError(CocaError):
    """A data file does not hold what it should; the message names the file and the line."""


class GradingError(CocaError):
    """Answers cannot be graded as asked (an unknown grader, no sandbox, no endpoint)."""


class TrainingError(CocaError):
    """Training cannot go on; the message names the step and the last good checkpoint."""


class MissingDependencyError(CocaError):
    """An optional package is not installed; the message says which and how to get it."""
