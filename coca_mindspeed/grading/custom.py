"""A custom grader (a function of a record and an answer, or a class), and protection from its exceptions."""

import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import CocaError, GradingError
from coca_mindspeed.grading.verdict import Grader, Outcome, TalliedGrader, Verdict
from coca_mindspeed.utils.custom_code import load_custom

logger = logging.getLogger(__name__)
# Errors that a grader raises itself, and system errors.
_NOT_THE_ANSWERS_FAULT = (CocaError, OSError, MemoryError)
_EXPECTED = "True (right), False (wrong), None (not gradable) or a Verdict"


class BrokenGraderError(GradingError):
    """The custom grader broke its interface; stop the run."""


class FaultTolerantGrader:
    """Wraps a grader; an exception but :class:`BrokenGraderError` becomes a verdict with the exception as the reason.

    If the exception is neither the grader's own nor the system's, and the gold answer can be graded, the answer is
    wrong: a policy must not gain by breaking the grader. Otherwise it is ungradable.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Find failing answers by bisection: at most twice as many calls as answers. Log their number in one line."""
        failures: list[str] = []
        verdicts = self._bisect(records, answers, failures)
        if failures:
            logger.warning(
                "the grader failed on %d of %d answers; the first: %s", len(failures), len(records), failures[0]
            )
        return verdicts

    def _bisect(self, records: Sequence[Record], answers: Sequence[str], failures: list[str]) -> list[Verdict]:
        if not records:
            return []
        try:
            return self._grader.grade(records, answers)
        except BrokenGraderError:
            raise
        except Exception as failure:  # noqa: BLE001  # it becomes a verdict
            if len(records) == 1:
                return [self._failed(records[0], failure, failures)]
        # Not in the handler: the exceptions of the halves would be chained to this one.
        half = len(records) // 2
        first = self._bisect(records[:half], answers[:half], failures)
        return first + self._bisect(records[half:], answers[half:], failures)

    def _failed(self, record: Record, failure: Exception, failures: list[str]) -> Verdict:
        problem = f"{type(failure).__name__}: {failure}"
        place = traceback.extract_tb(failure.__traceback__)[-1]
        one_line = " ".join(problem.split())
        failures.append(f"{record.name}: {one_line:.200} ({place.filename}:{place.lineno})")
        logger.debug("%s", failures[-1], exc_info=failure)
        answers_fault = not isinstance(failure, _NOT_THE_ANSWERS_FAULT) and self._grades(record)
        return Verdict(Outcome.WRONG if answers_fault else Outcome.UNGRADABLE, f"the grader failed: {problem}")

    def _grades(self, record: Record) -> bool:
        try:
            return self._grader.grade([record], [record.answer])[0].outcome is not Outcome.UNGRADABLE
        except Exception:  # noqa: BLE001  # as above
            return False

    def close(self) -> None:
        self._grader.close()


class CustomGrader(TalliedGrader):
    """Grades by the object that a pinned ``name`` names; an exception of it is handled by :class:`FaultTolerantGrader`.

    ``options`` are keyword arguments of the function, or of the class.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Raises ConfigError if the object cannot be imported, GradingError if it or its options do not fit."""
        super().__init__()
        self._adapter = _Adapter(name, options)
        self._grader = FaultTolerantGrader(self._adapter)

    def check(self, records: Sequence[Record]) -> None:
        """Grade the gold answer of the first record, and a wrong one, which may fail; any verdict is accepted."""
        for record in records[:1]:
            try:
                self._adapter.grade([record], [record.answer])
            except GradingError:
                raise
            except Exception as error:  # the user's own code
                where = f"{self._adapter.name}: failed on the answer {record.answer!r:.80} of record {record.id!r}"
                raise GradingError(f"{where}: {type(error).__name__}: {error}") from error
            try:
                self._adapter.grade([record, record], [record.answer, f"not {record.answer}"])
            except BrokenGraderError:
                raise
            except Exception:  # noqa: BLE001  # of an answer that it cannot read
                pass

    def verdicts(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade answers that are not of the run: they are not counted."""
        return self._grader.grade(records, answers)

    _grade = verdicts

    def close(self) -> None:
        self._adapter.close()


class _Adapter:
    """The user's object as a :class:`Grader`, without a protection against its exceptions."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self._options = name, dict(options)
        self._target = load_custom(name)
        self._many = isinstance(self._target, type)
        if not callable(self._target):
            raise GradingError(f"{name}: expected a function or a class, found {type(self._target).__name__}")
        try:
            inspect.signature(self._target).bind(*(() if self._many else ("record", "answer")), **self._options)
        except TypeError as error:
            given = f"the options {self._options}" if self._many else f"a record, an answer and {self._options}"
            raise GradingError(f"{name}: cannot be called with {given}: {error}") from error
        if self._many:
            try:
                self._target = self._target(**self._options)
            except Exception as error:  # the user's own code
                raise GradingError(f"{name}: cannot be made: {type(error).__name__}: {error}") from error
            if not callable(getattr(self._target, "grade", None)):
                raise GradingError(f"{name}: expected a class with the method grade(records, answers), found none")

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        if self._many:
            found = list(self._target.grade(records, answers))
            if len(found) != len(answers):
                raise BrokenGraderError(f"{self.name}: gave {len(found)} verdicts for {len(answers)} answers")
        else:
            found = [self._target(*each, **self._options) for each in zip(records, answers, strict=True)]
        return list(map(self._verdict, found))

    def _verdict(self, value: Any) -> Verdict:
        if isinstance(value, Verdict):
            return replace(value, final=True)
        if value is None:
            return Verdict(Outcome.UNGRADABLE, f"{self.name} gave None")
        if not isinstance(value, (bool, np.bool_)):
            raise BrokenGraderError(f"{self.name}: expected {_EXPECTED}, found {value!r:.80}")
        return Verdict(Outcome.RIGHT if value else Outcome.WRONG, final=True)

    def close(self) -> None:
        if callable(close := getattr(self._target, "close", None)) and self._many:
            close()
