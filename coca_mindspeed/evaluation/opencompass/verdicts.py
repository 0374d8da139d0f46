"""Verdicts from the results of OpenCompass's evaluators, which report them differently."""

import re
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.errors import DataError

# Prefer the cascade's final verdict over the rule's.
_CORRECT_KEYS = ("cascade_correct", "is_correct", "correct")
# A judge may fail to answer now and then; above this share its figures would say more about it than about the model.
_MAX_UNDECIDED = 0.01
# The letter or the words that OpenCompass's judge prompts ask for, and nothing else: searching for a letter would
# find the A of NOT_ATTEMPTED.
_JUDGED = re.compile(r"(?P<right>A|(?:A: ?)?CORRECT)|[BC]|(?:[BC]: ?)?(?:INCORRECT|NOT[ _]ATTEMPTED|INVALID)")


def correctness(result: Mapping[str, Any], count: int, where: str) -> list[bool]:
    """Return one verdict per sample from the result of an OpenCompass evaluator, in the order of the predictions.

    ``details`` is a list or a dict with numbers as keys; a row has a verdict, or the text of a judge.  A text that is
    not a verdict counts as wrong, up to one sample in a hundred (at least one).

    Raises:
        DataError: there is no verdict for some of the ``count`` samples, or a judge is undecided too often.
    """
    if "error" in result:
        raise DataError(f"{where}: the evaluator failed: {result['error']}")
    details: Any = result.get("details")
    try:
        rows = (
            [details[key] for key in sorted(details, key=int)] if isinstance(details, Mapping) else list(details or ())
        )
    except ValueError as error:
        raise DataError(f"{where}: details should be numbered, found key {next(iter(details))!r}") from error
    if len(rows) != count:
        raise DataError(
            f"{where}: the evaluator graded {len(rows)} of {count} samples; it drops samples whose gold answer it "
            "cannot parse, so that the rest cannot be matched: correct or remove these questions"
        )
    decisions = [_verdict(row, f"{where}, sample {index}") for index, row in enumerate(rows)]
    undecided = [index for index, decision in enumerate(decisions) if decision is None]
    if len(undecided) > max(1, _MAX_UNDECIDED * count):
        raise DataError(
            f"{where}: the judge gave no verdict on {len(undecided)} of {count} samples, the first is {undecided[0]}: "
            f"{rows[undecided[0]]!s:.200}; expected A, B, C or their words alone: use a judge that follows its "
            "instruction, or extract the verdict by its pred_postprocessor"
        )
    verdicts = [decision is True for decision in decisions]
    judged = any(not any(key in row for key in _CORRECT_KEYS) for row in rows)
    if not judged and count and isinstance(total := result.get("accuracy", result.get("score")), float):
        # A judge's total is not compared: it counts the A of NOT_ATTEMPTED as a verdict.
        ours = 100 * sum(verdicts) / count
        if abs(total - ours) > 1e-6:
            raise DataError(f"{where}: the evaluator's total is {total:.4f}, its samples say {ours:.4f}")
    return verdicts


def _verdict(row: Any, where: str) -> bool | None:
    """Correct or wrong; None where a judge's text is neither."""
    if isinstance(row, Mapping):
        for key in _CORRECT_KEYS:
            if row.get(key) is not None:
                return bool(row[key])
        if isinstance(judgement := row.get("llm_judge", row.get("prediction")), str):
            return read_judgement(judgement)
    raise DataError(f"{where}: expected one of {', '.join(_CORRECT_KEYS)} or a judgement, found {row!s:.200}")


def read_judgement(text: str) -> bool | None:
    """Whether a judge found the answer correct; None if its text is neither verdict."""
    match = _JUDGED.fullmatch(text.strip().strip("\"'`*.[]()").strip().upper())
    return None if match is None else match["right"] is not None
