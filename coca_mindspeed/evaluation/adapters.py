"""Predictions from other files: OpenCompass's results and verdicts, and responses graded against gold answers."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.records import Record, record_from_json, scalar_text
from coca_mindspeed.data.registry import read_own
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import (
    RESPONSE_ALIASES,
    WITHOUT_DATASET,
    Prediction,
    note_ignored,
    prediction_from_json,
    rows_by_field,
)
from coca_mindspeed.grading.registry import misfit_warnings
from coca_mindspeed.grading.verdict import MeasuredGrader, Outcome
from coca_mindspeed.utils.json_files import read_object
from coca_mindspeed.utils.tokenization import TokenCounter, parse_and_count

# Fields of a response that its prediction keeps, and those of its record where no file of gold answers has it.
_KEPT = (
    "confidence",
    "confidence_after",
    "tokens_to_confidence",
    "tokens",
    "answer_probability",
    "method",
    "model",
    "seed",
    "sample",
    "form",
)
_OF_RECORDS = ("question", "gold", "dataset", "category", "metadata")
_MAX_UNGRADABLE = 0.01  # share of answers; above it the gradable answers may be a biased selection

# Prefer the cascade's final verdict over the rule's.
_CORRECT_KEYS = ("cascade_correct", "is_correct", "correct")
# A judge may fail to answer now and then; above this share its figures would say more about it than about the model.
_MAX_UNDECIDED = 0.01
# The letter or the words that OpenCompass's judge prompts ask for, and nothing else: searching for a letter would
# find the A of NOT_ATTEMPTED.
_JUDGED = re.compile(r"(?P<right>A|(?:A: ?)?CORRECT)|[BC]|(?:[BC]: ?)?(?:INCORRECT|NOT[ _]ATTEMPTED|INVALID)")


def read_opencompass(work_dir: Path) -> list[Prediction]:
    """Read the predictions of an OpenCompass run with our evaluators, from its directory with ``results/``.

    Raises DataError: there are no results, or responses without a result, or another evaluator graded them.
    """
    results = [p for p in sorted(work_dir.glob("results/*/*.json")) if not re.search(r"_replica\d+$", p.stem)]
    if not results:
        raise DataError(
            f"{work_dir}: holds no results/MODEL/DATASET.json; expected the time-stamped folder of an OpenCompass run"
        )
    _refuse_ungraded(work_dir, {(path.parent.name, path.stem) for path in results})
    predictions = []
    for path in results:
        details = read_object(path).get("details")
        rows = details if isinstance(details, list) else [details]
        for number, row in enumerate(rows):
            if not isinstance(row, dict) or "tokens_to_confidence" not in row:
                raise DataError(
                    f"{path}: was graded by another evaluator; run opencompass with a configuration of "
                    "coca_mindspeed.evaluation.opencompass.config, or grade its responses (docs/evaluation.md)"
                )
            values = {**row, "dataset": path.stem, "model": path.parent.name}
            predictions.append(prediction_from_json(values, f"{path}, sample {number}"))
    return predictions


def _refuse_ungraded(work_dir: Path, graded: Collection[tuple[str, str]]) -> None:
    """Refuse responses without a result: OpenCompass writes none where an evaluator failed, and continues."""
    for path in sorted(work_dir.glob("predictions/*/*.json")):
        name = path.stem.removeprefix("tmp_")  # begins the name of predictions that are not all there yet
        whole = re.sub(r"_\d+$", "", name)  # a large data set is in parts, DATASET_0, DATASET_1, ...
        names = {name, whole} if path.with_name(f"{whole}_0.json").exists() else {name}
        if not any((path.parent.name, each) in graded for each in names):
            raise DataError(
                f"{path}: there is no results/{path.parent.name}/{name}.json for these responses; the inference was "
                "stopped or the evaluation failed (see logs/): run opencompass again with -r, or remove the file"
            )


def correctness(result: Mapping[str, Any], count: int, where: str) -> list[bool]:
    """Return one verdict per sample from the result of an OpenCompass evaluator, in the order of the predictions.

    ``details`` is a list or a dict with numbers as keys; a row has a verdict, or the text of a judge.  A text that is
    not a verdict counts as wrong, up to one sample in a hundred (at least one).

    Raises DataError: there is no verdict for some of the ``count`` samples, or a judge is undecided too often.
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


def is_ungraded(path: Path, columns: Mapping[str, str] | None = None) -> bool:
    """Whether the rows of a file hold responses without a verdict; DataError if only some have a verdict."""
    first = ""
    for where, row in rows_by_field(path, columns):
        if "correct" not in row:
            if not first and "response" not in _with_aliases(row):
                return False
            first = first or where
        elif first:
            reason = f"has a verdict ('correct'), and {first} has none"
            raise DataError(f"{where}: {reason}; put rows with and without a verdict into files of their own")
        else:
            return False  # a later row without a verdict is no prediction
    return bool(first)


def _with_aliases(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "correct" in row:
        return row
    renamed = {alias: name for alias, name in RESPONSE_ALIASES.items() if name not in row}
    return {renamed.get(name, name): value for name, value in row.items()}


def read_responses(
    path: Path,
    gold: Path | None,
    grader: MeasuredGrader,
    *,
    columns: Mapping[str, str] | None = None,
    grader_name: str = "auto",
    grader_options: Mapping[str, Any] | None = None,
    parser: ResponseParser | None = None,
    tokenizer: TokenCounter | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Prediction]:
    """Grade plain responses: a row each with the question's ``id`` and the ``response`` (or ``prediction``).

    A ``confidence`` key takes precedence over the confidence in the response, and the fields of a prediction that
    grading does not decide (``method``, ``model``, ``seed``, ``sample``, ...) are kept.  ``gold`` holds records with
    the same ids; None: each row has its own ``question`` and ``gold`` (or ``answer``), needs no ``id``, and may have
    the other fields of a record.  Fields without effect are printed.  Responses, gold answers and ids may be numbers.
    ``columns`` maps fields to columns.  Without ``tokenizer``, tokens to confidence are unknown.  ``warn`` is called
    with a warning if responses hold no answer, or many answers name the gold answer and are graded wrong;
    ``grader_name`` and ``grader_options`` are the grader's for it.

    Raises DataError: with file and line; also if a gold answer cannot be used, a model has no response to a record, or
    more than one answer in a hundred (and more than one) cannot be graded.  Fewer are left out of the metrics.
    """
    parser = parser or ResponseParser()
    rows = [
        (where, _response_row(row, where, columns or {}, number if gold is None else None))
        for number, (where, row) in enumerate(rows_by_field(path, columns))
    ]
    used = ["id", "response", *_KEPT, *(_OF_RECORDS if gold is None else ())]
    note_ignored(path, (name for _, row in rows for name in row), used)
    records = _own_records(rows) if gold is None else {record.id: record for record in read_own(str(gold), {})}
    if gold is not None:
        _refuse_other_ids(path, rows, records, gold)
    grader.check(list(records.values()))
    parsed = [parse_and_count(row["response"], parser, tokenizer) for _, row in rows]
    asked, answers = [records[row["id"]] for _, row in rows], [parts.answer for parts, _ in parsed]
    verdicts = grader.grade(asked, answers)
    ungradable = [i for i, verdict in enumerate(verdicts) if verdict.outcome is Outcome.UNGRADABLE]
    if len(ungradable) > max(1, _MAX_UNGRADABLE * len(verdicts)):
        first = ungradable[0]
        raise DataError(
            f"{rows[first][0]}: {len(ungradable)} of {len(verdicts)} answers cannot be graded, this one "
            f"because: {verdicts[first].reason}; correct {gold or path}, or choose another grader"
        )
    contains = {"match": "contains"}
    option = json.dumps(contains if grader_name == "factual" else {"factual": contains})
    fixes = {
        "factual": f"use --grader-options '{option}'",
        "math": 'set "category": "factual" in the records, and use --grader auto',
    }
    for text in misfit_warnings(grader_name, grader_options, asked, answers, verdicts, fixes):
        warn(text)
    if empty := [where for (where, _), answer in zip(rows, answers, strict=True) if not answer.strip()]:
        count = f"{len(empty)} of {len(rows)} responses"
        warn(f"warning: {count} hold no answer and count as wrong, the first is {empty[0]}")
    seen: Counter[tuple[str | None, str | None, str]] = Counter()
    predictions = []
    for (where, row), record, (parts, counted), verdict in zip(rows, asked, parsed, verdicts, strict=True):
        values = {
            "confidence": parts.confidence,
            "confidence_after": parts.confidence_after,
            "tokens_to_confidence": None if "confidence" in row else counted,
            **{name: row[name] for name in _KEPT if name in row},
            "id": record.id,
            "dataset": record.dataset,
            "question": record.question,
            "response": row["response"],
            "correct": verdict.correct_or_none,
            "category": record.category,
            "gold": record.answer,
        }
        prediction = prediction_from_json(values, where)
        run = (prediction.model, prediction.method, record.id)
        predictions.append(prediction if "sample" in row else replace(prediction, sample=seen[run]))
        seen[run] += 1
    return predictions


def _refuse_other_ids(
    path: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], records: Mapping[str, Record], gold: Path
) -> None:
    """Raise DataError for an id that is not in ``gold``, or a record that a model or method has no response to."""
    answered: dict[str, set[str]] = {}
    for where, row in rows:
        if row["id"] not in records:
            raise DataError(f"{where}: id {row['id']!r} is not in {gold}")
        run = ", ".join(f"{name} {row[name]!r}" for name in ("model", "method") if row.get(name) is not None)
        answered.setdefault(run, set()).add(row["id"])
    for run, ids in answered.items():
        if unanswered := sorted(set(records) - ids):
            count = f"{len(unanswered)} of {len(records)} questions of {gold}"
            raise DataError(
                f"{path}: has no response {f'of {run} ' if run else ''}to {count}, the first is "
                f"{json.dumps(unanswered[0])}; leaving them out would change the accuracy"
            )


def _response_row(row: Mapping[str, Any], where: str, columns: Mapping[str, str], number: int | None) -> dict[str, Any]:
    """A row with ``id``, ``response`` and ``gold`` as text; ``number`` is the id of a row without one.

    Raises DataError with the column of the file that is missing or holds neither text nor a number.
    """
    values = dict(_with_aliases(row))
    if number is not None:
        values.setdefault("id", str(number))
        if "gold" not in values:
            fix = "name records with the same ids (--gold), or the column of the gold answers (--columns)"
            raise DataError(f"{where}: has a response, and neither a verdict ('correct') nor a gold answer; {fix}")
    names: Sequence[str] = ("id", "response") if number is None else ("question", "id", "response", "gold")
    for name in names:
        alias = next((alias for alias, of in RESPONSE_ALIASES.items() if of == name and alias in row), name)
        column = columns.get(name, name if name in row else alias)
        if name not in values:
            fix = f'--columns \'{{"{name}": "COLUMN"}}\' reads a column of another name'
            raise DataError(f"{where}: column {column!r} is missing; the row has {', '.join(map(repr, row))}; {fix}")
        if name == "question":  # checked with the record
            continue
        try:
            values[name] = scalar_text(values[name])
        except ValueError as error:
            raise DataError(f"{where}: column {column!r} should be {error}") from error
    return values


def _own_records(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Record]:
    """The records that rows with a ``gold`` answer of their own hold, by id; samples of a question must agree."""
    records: dict[str, Record] = {}
    for where, row in rows:
        asked = {"question": row["question"], "answer": row["gold"], "id": row["id"]}
        asked |= {name: row[name] for name in ("dataset", "category", "metadata") if row.get(name) is not None}
        record = record_from_json(asked, where, WITHOUT_DATASET, 0)
        if records.setdefault(record.id, record) != record:
            raise DataError(f"{where}: id {record.id!r} has another question or gold answer above")
    return records
