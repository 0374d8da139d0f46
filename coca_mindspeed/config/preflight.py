"""The check of a start: each engine gives rows and formulas, and one order holds for all engines."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.config.layout import Layout
from coca_mindspeed.config.plan import Phase, Plan, Questions, Row, form_notes, question_rows, short_thoughts
from coca_mindspeed.errors import Problem


class Names(NamedTuple):
    """The words that a run's file has for keys of all engines, for messages.

    Attributes:
        stable: the override that chooses the form whose confidence keeps learning.
        max_new: the key of the longest response.
        train, evaluate: keys of the training and the held-out questions, and their values.
    """

    stable: str
    max_new: str
    train: tuple[str, Any]
    evaluate: tuple[str, Any]


def preflight(
    title: str,
    method: MethodSettings,
    names: Names,
    layout: Layout,
    *,
    problems: Sequence[Problem] = (),
    questions: Callable[[], Questions | None],
    memory: Sequence[Phase] = (),
    rows: Iterable[Row],
    notes: Iterable[str] = (),
    warnings: Iterable[Problem] = (),
) -> Plan:
    """Check a run: section, requirements, layout and memory, then data; out comes its plan.

    ``problems`` are of all but the data.  ``questions`` reads the record files, of a run without problems; None if they
    are not here.
    """
    asked = None if problems else questions()
    warned = [*warnings, *short_thoughts(method, names.max_new, layout.max_new)]
    if asked is not None:
        warned += [Problem(code, *names.train, reason, fix) for code, reason, fix in asked.flaws]
        warned += asked.counts.warnings(*names.train, *names.evaluate)
    noted = (*form_notes(method, names.stable), *notes)
    listed = (*rows, *question_rows(asked and asked.counts))
    return Plan(title, listed, tuple(memory), noted, tuple(problems), tuple(warned))
