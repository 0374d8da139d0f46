"""Predictions and verdicts from OpenCompass's output.

Evaluators of OpenCompass report verdicts differently: ``details`` is a list or a dict, the key is ``correct``,
``is_correct`` or ``cascade_correct``, a judge leaves its text, and grouped samples turn every value into a list.  A
result without a verdict for every sample raises.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, prediction_from_json
from coca_mindspeed.utils.tokenization import TokenCounter, parse_and_count

# Prefer the cascade's final verdict over the rule's.
_CORRECT_KEYS = ("cascade_correct", "is_correct", "correct")
# A judge may fail to answer now and then; above this share its figures would say more about it than about the model.
_MAX_UNDECIDED = 0.01
# The letter or the words that OpenCompass's judge prompts ask for, and nothing else: searching for a letter would
# find the A of NOT_ATTEMPTED.
_JUDGED_RIGHT = re.compile(r"(?:A|CORRECT|A: ?CORRECT)")
_JUDGED_WRONG = re.compile(r"(?:B|C|(?:[BC]: ?)?(?:INCORRECT|NOT[ _]ATTEMPTED|INVALID))")

# A part of a large data set's predictions, and the beginning of the name of predictions that are not all there yet.
_SHARD = re.compile(r"(?P<dataset>.+)_(?P<number>0|[1-9][0-9]*)")
_UNFINISHED = "tmp_"


def read_judgement(text: str) -> bool | None:
    """Whether a judge found the answer correct; None if its text is neither verdict."""
    words = text.strip().strip("\"'`*.[]()").strip().upper()
    if _JUDGED_RIGHT.fullmatch(words):
        return True
    return False if _JUDGED_WRONG.fullmatch(words) else None


def _rows(details: Any, where: str) -> list[Any]:
    """A row for each sample, replica by replica: numbered rows in order, grouped samples of a question taken apart."""
    if isinstance(details, Mapping):
        try:
            rows = [details[key] for key in sorted(details, key=int)]
        except ValueError as error:
            raise DataError(f"{where}: details should be numbered, found key {next(iter(details))!r}") from error
    elif isinstance(details, Sequence) and not isinstance(details, str):
        rows = list(details)
    else:
        raise DataError(
            f"{where}: the evaluator's result has no verdict per sample, which scoring confidence needs; found details "
            f"of type {type(details).__name__}"
        )
    if not rows or not all(isinstance(row, Mapping) and "example_abbr" in row for row in rows):
        return rows
    columns = [{key: value for key, value in row.items() if isinstance(value, list)} for row in rows]
    samples = max((len(value) for value in columns[0].values()), default=1)
    return [{key: value[i] for key, value in row.items() if len(value) > i} for i in range(samples) for row in columns]


def correctness(result: Mapping[str, Any], count: int, where: str) -> list[bool]:
    """Return one verdict per sample from an evaluator's result, in the order of the predictions.

    ``result`` was returned by an OpenCompass evaluator or read from a results file.  A judge's text that is not a
    verdict counts as wrong, up to one sample in a hundred (at least one).

    Raises:
        DataError: there is no verdict for some of the ``count`` samples, or a judge is undecided too often.
    """
    if "error" in result:
        raise DataError(f"{where}: the evaluator failed: {result['error']}")
    rows = _rows(result.get("details"), where)
    if len(rows) != count:
        raise DataError(
            f"{where}: the evaluator graded {len(rows)} of {count} samples; it drops samples whose gold answer it "
            "cannot parse, so that the rest cannot be matched: correct or remove these questions"
        )
    decisions = [_verdict(row, f"{where}, sample {index}") for index, row in enumerate(rows)]
    undecided = [index for index, decision in enumerate(decisions) if decision is None]
    if len(undecided) > max(1, _MAX_UNDECIDED * count):
        row = rows[undecided[0]]
        said = str(row.get("llm_judge", row.get("prediction")))
        raise DataError(
            f"{where}: the judge gave no verdict on {len(undecided)} of {count} samples; on sample {undecided[0]} it "
            f"answered {said[:200]!r}, expected A, B, C or their words alone: use a judge that follows its "
            "instruction, or extract the verdict by its pred_postprocessor"
        )
    verdicts = [decision is True for decision in decisions]
    judged = any(isinstance(row, Mapping) and not any(key in row for key in _CORRECT_KEYS) for row in rows)
    for key in ("accuracy", "score"):
        # A judge's total is not compared: it counts the A of NOT_ATTEMPTED as a verdict.
        if not judged and isinstance(result.get(key), float) and count:
            ours = 100 * sum(verdicts) / count
            if abs(result[key] - ours) > 1e-6:
                raise DataError(f"{where}: the evaluator's {key} is {result[key]:.4f}, its samples say {ours:.4f}")
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


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from error


def _predicted(work_dir: Path, model: str, dataset: str) -> list[Mapping[str, Any]]:
    folder = work_dir / "predictions" / model
    whole = folder / f"{dataset}.json"
    paths = [whole] if whole.exists() else _shards(folder, dataset)
    if not paths:
        raise DataError(f"{whole}: is missing; it should hold the responses that {dataset}.json of results graded")
    rows: list[Mapping[str, Any]] = []
    for path in paths:
        content = _read(path)
        try:
            part = [content[str(index)] for index in range(len(content))]
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: expected predictions numbered from 0 without gaps; {error} is missing") from error
        if nameless := [index for index, row in enumerate(part) if "prediction" not in row]:
            raise DataError(f"{path}, sample {nameless[0]}: expected a 'prediction', found {sorted(part[nameless[0]])}")
        rows += part
    return rows


def _shards(folder: Path, dataset: str) -> list[Path]:
    """Files ``DATASET_0.json``, ``DATASET_1.json``, ... into which OpenCompass splits a large data set."""
    names = [_SHARD.fullmatch(path.stem) for path in folder.glob("*.json")]
    count = sum(name is not None and name["dataset"] == dataset for name in names)
    paths = [folder / f"{dataset}_{number}.json" for number in range(count)]
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: is missing; there are {count} parts of {dataset}")
    return paths


def _refuse_ungraded(work_dir: Path, results: Sequence[Path]) -> None:
    """Refuse responses without a result: OpenCompass writes none where an evaluator failed, and continues."""
    graded = {(path.parent.name, path.stem) for path in results}
    answered = {(path.parent.name, path.stem) for path in (work_dir / "predictions").glob("*/*.json")}
    ungraded: dict[str, None] = {}
    for model, file in sorted(answered - graded):
        name = file.removeprefix(_UNFINISHED)
        finished = file == name
        if not finished and (model, name) in answered:
            continue
        shard = _SHARD.fullmatch(name)
        if shard is not None and (model, f"{shard['dataset']}_0") in answered:
            name = shard["dataset"]
            if finished and (model, name) in graded:
                continue
        ungraded[f"{model}/{name}"] = None
    if ungraded:
        raise DataError(
            f"{work_dir}: there are responses, but no results/MODEL/DATASET.json for {', '.join(ungraded)}; the "
            "inference was stopped or the evaluation failed (see logs/): run opencompass again with -r, or remove the "
            "files from predictions/"
        )


def _question(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    texts = [str(turn.get("prompt", turn.get("content", ""))) for turn in prompt if turn.get("role") != "SYSTEM"]
    return texts[-1] if texts else ""


def read_opencompass(
    work_dir: Path, *, parser: ResponseParser | None = None, tokenizer: TokenCounter | None = None
) -> list[Prediction]:
    """Read the predictions of an OpenCompass run, from its directory with ``predictions/`` and ``results/``.

    Without ``tokenizer``, tokens to confidence are unknown unless our own evaluator has counted them.

    Raises:
        DataError: a file is missing or has no verdicts, or responses have no result.
    """
    parser = parser or ResponseParser()
    results = sorted((work_dir / "results").glob("*/*.json"))
    results = [path for path in results if not re.search(r"_replica\d+$", path.stem)]
    if not results:
        raise DataError(
            f"{work_dir}: holds no results/MODEL/DATASET.json; expected the time-stamped folder of an OpenCompass run"
        )
    _refuse_ungraded(work_dir, results)
    predictions = []
    for path in results:
        model, dataset = path.parent.name, path.stem
        result, rows = _read(path), _predicted(work_dir, model, dataset)
        verdicts = correctness(result, len(rows), str(path))
        questions = _questions(result["details"], len(rows))
        for index, (row, correct) in enumerate(zip(rows, verdicts, strict=True)):
            if (own := _own(result["details"], index)) is not None:
                stated, tokens = own["confidence"], own["tokens_to_confidence"]
            else:
                parsed, tokens = parse_and_count(row["prediction"], parser, tokenizer)
                stated = parsed.confidence
            gold = row.get("gold")
            values = {
                "id": str(index % questions),
                "dataset": dataset,
                "question": _question(row.get("origin_prompt", "")),
                "response": row["prediction"],
                "confidence": stated,
                "correct": correct,
                "tokens_to_confidence": tokens,
                "model": model,
                "sample": index // questions,
                "gold": None if gold is None else str(gold),
            }
            predictions.append(prediction_from_json(values, f"{path}, sample {index}"))
    return predictions


def _own(details: Any, index: int) -> Mapping[str, Any] | None:
    """The row of our own evaluator, which has already removed the confidence."""
    row = details[index] if isinstance(details, list) else None
    return row if isinstance(row, Mapping) and "tokens_to_confidence" in row else None


def _questions(details: Any, count: int) -> int:
    """Number of questions behind ``count`` graded responses."""
    own = _own(details, count - 1)
    if own is not None:
        return int(own["question"]) + 1
    grouped = isinstance(details, list) and all(isinstance(d, Mapping) and "example_abbr" in d for d in details)
    return len(details) if grouped else count
