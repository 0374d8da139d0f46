"""Graders by name."""

from collections.abc import Callable

from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.exact import ExactGrader
from coca_mindspeed.grading.verdict import Grader

_GRADERS: dict[str, Callable[[], Grader]] = {"exact": ExactGrader}


def build_grader(name: str) -> Grader:
    """The grader called ``name``.

    Raises:
        GradingError: there is none; the message lists those that there are.
    """
    if name not in _GRADERS:
        raise GradingError(f"unknown grader {name!r}; known graders: {', '.join(_GRADERS)}")
    return _GRADERS[name]()
