"""Graders by name, a grader that chooses one for each record, and the checks of records before a run."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coca_mindspeed.data.records import CATEGORIES, Record, RecordError, default_category
from coca_mindspeed.errors import GradingError, did_you_mean
from coca_mindspeed.grading.custom import CustomGrader
from coca_mindspeed.grading.factual import names_answer
from coca_mindspeed.grading.verdict import MeasuredGrader, Outcome, Verdict
from coca_mindspeed.utils.custom_code import is_custom, pinned

# Imported on use: the exact grader needs neither sympy nor openai.
_GRADERS = {
    "exact": "coca_mindspeed.grading.verdict:ExactGrader",
    "math": "coca_mindspeed.grading.math.grader:MathGrader",
    "code": "coca_mindspeed.grading.code:CodeGrader",
    "factual": "coca_mindspeed.grading.factual:FactualGrader",
    "simpleqa": "coca_mindspeed.grading.judge:JudgeGrader",
    "auto": "coca_mindspeed.grading.registry:AutoGrader",
}
GRADER_NAMES = tuple(_GRADERS)
_Options = Mapping[str, Any] | None

# A record's own metadata["grader"] wins over its data set, and that over its category, whose name its grader has.
_BY_DATASET = {"arithmetic": "exact", "simpleqa": "simpleqa", "triviaqa": "factual"}
_MANY = 0.25  # share of answers that name the gold answer and are wrong


def known_grader(name: str) -> str:
    """Return ``name``, or raise ``GradingError`` if it is not one of ``GRADER_NAMES``.

    A custom grader is returned with its fingerprint; ``GradingError`` if there is no such file.
    """
    if is_custom(name):
        try:
            return pinned(name)
        except ValueError as error:
            raise GradingError(f"grader {name!r}: {error}") from error
    return _known(name, GRADER_NAMES, "grader")


def grader_class(name: str) -> type[Any]:
    """The class of a grader; ``check`` is a static method except for ``math`` and ``auto``."""
    module, _, cls = _GRADERS[known_grader(name)].partition(":")
    grader: type[Any] = getattr(importlib.import_module(module), cls)
    return grader


def build_grader(name: str, config: Mapping[str, Any] | None = None) -> MeasuredGrader:
    """Make a grader from its options (for ``auto``, options of the others by name).

    Raises:
        GradingError: an unknown name or option, or something that the grader needs is missing.
        ConfigError: a custom grader cannot be imported.
    """
    if is_custom(name):
        return CustomGrader(known_grader(name), config or {})
    grader = grader_class(name)
    options = dict(config or {})
    for option in options:
        if name == "auto" and (owners := [n for n in CATEGORIES if option in _options_of(grader_class(n))]):
            raise GradingError(
                f"option {option!r} of the grader 'auto': expected it under its own grader, as "
                f'{{"{owners[0]}": {{"{option}": ...}}}}'
            )
        _known(option, _options_of(grader), f"option of the grader {name!r}")
    built: MeasuredGrader = grader(**options)
    return built


def _options_of(grader: type[Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(grader).parameters)


def grader_name(record: Record) -> str:
    """The name of the record's grader; ``GradingError`` if it is unknown or nothing determines one."""
    where = f"{record.name}: grader"
    if (named := record.metadata.get("grader")) is not None:
        if not isinstance(named, str):
            raise GradingError(f"{where} should be a name, found {named!r:.80}")
        return _known(named, tuple(n for n in GRADER_NAMES if n != "auto"), where)
    if record.dataset in _BY_DATASET:
        return _BY_DATASET[record.dataset]
    if record.category not in CATEGORIES:
        categories = ", ".join(CATEGORIES)
        raise GradingError(f"{where} of category {record.category!r} is not known; use a category of {categories}")
    return record.category


class AutoGrader:
    """Uses for each record the grader that it names, or its data set's, or its category's.

    Args:
        exact, math, code, factual, simpleqa: options of each; a grader is made for its first record.
    """

    def __init__(
        self, exact: _Options = None, math: _Options = None, code: _Options = None,
        factual: _Options = None, simpleqa: _Options = None,
    ) -> None:  # fmt: skip
        self._options = {"exact": exact, "math": math, "code": code, "factual": factual, "simpleqa": simpleqa}
        self._graders: dict[str, MeasuredGrader] = {}

    def check(self, records: Sequence[Record]) -> None:
        for name, indices in self._places(records).items():
            self._graders[name].check([records[i] for i in indices])

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade nothing if any record has no grader."""
        if len(records) != len(answers):
            raise ValueError(f"{len(records)} records and {len(answers)} answers")
        places = self._places(records)
        verdicts: dict[int, Verdict] = {}
        for name, indices in places.items():
            graded = self._graders[name].grade([records[i] for i in indices], [answers[i] for i in indices])
            verdicts.update(zip(indices, graded, strict=True))
        return [verdicts[index] for index in range(len(records))]

    def metrics(self) -> dict[str, float]:
        """Totals of all graders, and each grader's own as ``name/...``."""
        totals: dict[str, float] = {}
        parts: dict[str, float] = {}
        for name, grader in self._graders.items():
            for key, value in grader.metrics().items():
                totals[key] = totals.get(key, 0.0) + value
                parts[f"{name}/{key}"] = value
        return {**totals, **parts}

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()

    def _places(self, records: Sequence[Record]) -> dict[str, list[int]]:
        """Grader name -> indices of its records; makes the graders."""
        places: dict[str, list[int]] = {}
        for index, record in enumerate(records):
            places.setdefault(grader_name(record), []).append(index)
        for name in places:
            if name not in self._graders:
                self._graders[name] = build_grader(name, self._options[name])
        return places


def _known(name: str, names: Sequence[str], what: str) -> str:
    if name in names:
        return name
    own = "; a grader of your own is FILE.py:NAME" if name.endswith(".py") else ""
    raise GradingError(f"unknown {what} {name!r}{did_you_mean(name, names)}; known: {', '.join(names) or 'none'}{own}")


def label_checker(
    math: Callable[[Sequence[str]], Sequence[str]],
) -> Callable[[Sequence[Record]], list[str]]:
    """Return the label check of preparation: for each record, why its gold answer cannot be graded, or ``""``.

    ``math`` checks all gold answers of mathematics of a batch at once, because it parses in processes of its own.
    """

    def check(records: Sequence[Record]) -> list[str]:
        problems = [_label_problem(record) for record in records]
        places = [index for index, problem in enumerate(problems) if problem is None]
        parsed = dict(zip(places, math([records[index].answer for index in places]), strict=True))
        return [parsed[index] if problem is None else problem for index, problem in enumerate(problems)]

    return check


def _label_problem(record: Record) -> str | None:
    """Why the record's grader would refuse it, or an empty string; None if its answer has yet to be parsed."""
    try:
        name = grader_name(record)
        if name == "math":
            return None
        grader_class(name).check([record])
    except RecordError as error:  # without the record's name: reasons are counted
        return error.problem
    except GradingError as error:
        return str(error).removeprefix(f"{record.name}: ")
    return "" if name == "code" or record.answer.strip() else "empty gold answer"  # programs have tests instead


def misfit_warnings(
    grader: str,
    options: Mapping[str, Any] | None,
    records: Sequence[Record],
    answers: Sequence[str],
    verdicts: Sequence[Verdict],
    fixes: Mapping[str, str],
) -> list[str]:
    """Return a warning for each grader that finds many answers wrong although they name the gold answer in words.

    ``grader`` is the grader's name, ``auto`` by record; ``fixes`` tells for ``factual`` and ``math`` what to set.
    ``options`` are those of the grader: of ``factual`` that matches ``contains`` already, there is nothing to say.
    """
    options = options or {}
    match = (options.get("factual") or {} if grader == "auto" else options).get("match")
    fixes = {name: fix for name, fix in fixes.items() if name != "factual" or match != "contains"}
    named = dict.fromkeys(fixes, 0)
    for record, answer, verdict in zip(records, answers, verdicts, strict=True):
        name = grader_name(record) if grader == "auto" else grader
        in_words = name in named and (name == "factual" or default_category(record.answer) == "factual")
        if in_words and verdict.outcome is Outcome.WRONG:
            named[name] += names_answer(record, answer)
    return [
        f"warning: {named[name]} of {len(records)} name the gold answer and are graded wrong by {name}; {fix} "
        "(docs/grading.md)"
        for name, fix in fixes.items()
        if records and named[name] >= _MANY * len(records)
    ]
