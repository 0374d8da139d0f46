"""Preparation of a data set: rows become records, which are filtered, checked, deduplicated and split."""

import json
import re
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TextIO

from coca_mindspeed.data.formats import HubDataset, Row
from coca_mindspeed.data.prompts import encode_prompts, prompt_messages
from coca_mindspeed.data.published import RowError, Ungradable
from coca_mindspeed.data.records import Record, record_to_json
from coca_mindspeed.data.registry import DataSource
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.characters import compatible
from coca_mindspeed.utils.directories import output_directory
from coca_mindspeed.utils.files import file_sha256
from coca_mindspeed.utils.json_files import to_json_line, write_json
from coca_mindspeed.utils.tokenization import load_tokenizer

# In the order of the pipeline.
CHECKS = {
    "malformed": "not in the source's form",
    "ungradable": "well-formed, but nothing to grade an answer by",
    "split": "not in the benchmark's test split",
    "source": "excluded source",
    "difficulty": "excluded difficulty",
    "length": "prompt too long",
    "contamination": "shares a passage with an evaluation question",
    "gold": "gold answer cannot be graded",
    "duplicate": "repeats an earlier question",
}

#: Returns why a record is dropped, or None to keep it.  Reasons are counted, so they name no single record.
Filter = Callable[[Record], str | None]
#: For each record, why its gold answer cannot be graded, or an empty string.
LabelChecker = Callable[[Sequence[Record]], Sequence[str]]


def by_difficulty(low: float, high: float) -> Filter:
    """Keep records whose ``metadata["difficulty"]`` is in ``[low, high]``; 0 is easiest."""

    def keep(record: Record) -> str | None:
        difficulty = record.metadata.get("difficulty")
        if difficulty is None:
            return "unknown"
        return f"below {low:g}" if difficulty < low else f"above {high:g}" if difficulty > high else None

    return keep


def by_source(include: Collection[str], exclude: Collection[str]) -> Filter:
    """Keep records whose ``metadata["source"]`` is in ``include`` (empty: any) and not in ``exclude``."""

    def keep(record: Record) -> str | None:
        source = str(record.metadata.get("source", "unknown"))
        return source if source in exclude or (include and source not in include) else None

    return keep


def by_length(tokenizer_directory: Path, system_prompt: str | None, longest: int) -> Filter:
    """Keep records whose whole prompt (without a chat template: its texts) has at most ``longest`` tokens."""
    tokenizer = load_tokenizer(tokenizer_directory)

    def count(record: Record) -> int:
        if tokenizer.chat_template is not None:
            return len(encode_prompts(tokenizer, [record], system_prompt)[0])
        messages = prompt_messages(record, system_prompt)
        return sum(len(tokenizer.encode(m["content"], add_special_tokens=False)) for m in messages)

    return lambda record: f"prompt longer than {longest} tokens" if count(record) > longest else None


# Scripts without spaces (kana, CJK, hangul) are cut into characters, all others into words.
_SCRIPT = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_SCRIPT}]|[^\W_{_SCRIPT}]+")
PASSAGE_WORDS, SHORTEST_PASSAGE = 13, 6


def normalise_text(text: str) -> str:
    """Compatible characters, case folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", compatible(text)).casefold().split())


def _words(question: str) -> list[str]:
    """Words without symbols; here x² is x2, to find more copies."""
    return _WORDS.findall(unicodedata.normalize("NFKC", normalise_text(question)))


def _passages(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


class Overlap(NamedTuple):
    """A passage of a training question that is also in an evaluation question."""

    dataset: str
    record: str
    passage: str


class EvaluationIndex:
    """Passages of ``length`` words of evaluation questions.

    A shorter question is one passage; one of less than ``SHORTEST_PASSAGE`` words is found only as a whole question.
    """

    def __init__(self, records: Iterable[Record], length: int = PASSAGE_WORDS) -> None:
        self._questions: dict[str, Record] = {}
        self._passages: dict[int, dict[str, Record]] = {}  # by number of words
        for record in records:
            words = _words(record.question)
            self._questions.setdefault(" ".join(words), record)
            if len(words) >= SHORTEST_PASSAGE:
                known = self._passages.setdefault(min(length, len(words)), {})
                for passage in _passages(words, min(length, len(words))):
                    known.setdefault(passage, record)

    def overlap(self, record: Record) -> Overlap | None:
        """Return the longest indexed passage in the question, the first of several; None if there is none."""
        words = _words(record.question)
        question = " ".join(words)
        if question and (owner := self._questions.get(question)):
            return Overlap(owner.dataset, owner.id, question)
        for length, known in sorted(self._passages.items(), reverse=True):
            for passage in _passages(words, length):
                if owner := known.get(passage):
                    return Overlap(owner.dataset, owner.id, passage)
        return None


GoldMode = Literal["drop", "report", "off"]
_GOLD_BATCH = 512  # records
_REPORTED = ("skip_bad", "gold", "validation", "seed")


@dataclass(frozen=True, slots=True)
class Preparation:
    """All settings that decide the output.

    Attributes:
        skip_bad: number of malformed rows to skip; one more stops the run.
        filters: check of the report -> filter.
        evaluation: for decontamination.
        gold: treatment of records whose gold answer cannot be graded.
        validation: fraction of the records, in [0, 1), for ``validation.jsonl``.
        described: further options for the report.
    """

    source: DataSource
    inputs: Sequence[Path] | HubDataset
    check_labels: LabelChecker
    skip_bad: int = 0
    filters: Mapping[str, Filter] = field(default_factory=dict)
    evaluation: EvaluationIndex | None = None
    gold: GoldMode = "drop"
    validation: float = 0.0
    seed: int = 0
    described: dict[str, Any] = field(default_factory=dict)


def prepare(
    preparation: Preparation, output: Path, overwrite: bool = False, on_row: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Prepare a data set into the directory ``output``, atomically, and return the report.

    It holds ``train.jsonl`` (``test.jsonl`` for a benchmark), optionally ``validation.jsonl``, ``findings.jsonl``
    and ``report.json``.  The same input and options give the same bytes.  ``on_row`` is called after
    each row.

    Raises DataError: an input cannot be read, too many rows are malformed, no row is left, or the output exists.
    """
    source = preparation.source
    with (
        output_directory(output, overwrite) as directory,
        (directory / "findings.jsonl").open("w", encoding="utf-8") as findings,
        tempfile.TemporaryFile(dir=directory) as lines,
    ):
        cleaning = _Cleaning(preparation, findings, lines)
        for row in source.rows(preparation.inputs):
            cleaning.take(row)
            on_row()
        cleaning.check_labels()
        if not cleaning.kept:
            reasons = [f"{check}: {counts.total()}" for check, counts in cleaning.dropped.items()]
            why = ", ".join(reasons) or "the input has no rows"
            raise DataError(f"{source.name}: no row is left of {cleaning.files.total()}: {why}")
        outputs = _write(preparation, cleaning.kept, lines, directory)
        local = not isinstance(preparation.inputs, HubDataset)
        report = {
            "dataset": source.name,
            "rows_in": cleaning.files.total(),
            "rows_out": len(cleaning.kept),
            "dropped": _sorted_counts(cleaning.dropped),
            "reported": _sorted_counts(cleaning.reported),
            "outputs": outputs,
            "inputs": [
                {"file": file, "rows": rows, "sha256": file_sha256(Path(file)) if local else None}
                for file, rows in cleaning.files.items()
            ],
            "options": {name: getattr(preparation, name) for name in _REPORTED} | preparation.described,
        }
        write_json(directory / "report.json", report)
    return report


def _sorted_counts(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Order checks as in the pipeline, and the reasons of each by falling count."""
    return {
        check: dict(sorted(counts[check].items(), key=lambda item: (-item[1], item[0])))
        for check in CHECKS
        if check in counts
    }


class _Cleaning:
    """First pass, row by row: keep the lines of records, and log and count dropped and doubtful rows.

    The lines are kept in a temporary file, because rows of TACO reach megabytes.
    """

    def __init__(self, preparation: Preparation, findings: TextIO, lines: IO[bytes]) -> None:
        self._preparation = preparation
        self._findings = findings
        self._lines = lines
        self.files: Counter[str] = Counter()  # rows of each file, in order
        self.dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.reported: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.kept: list[tuple[str, int]] = []  # id of each record, and where its line starts
        self._ids: dict[str, str] = {}
        self._questions: dict[str, tuple[str, str]] = {}  # where, and the gold answer
        self._unchecked: list[tuple[Record, Row]] = []

    def take(self, row: Row) -> None:
        """Keep the row's record, or log why it is dropped."""
        number = self.files.total()
        self.files[row.file] += 1
        try:
            record = self._preparation.source.record(row, number)
            if (first := self._ids.setdefault(record.id, row.where)) != row.where:
                raise RowError(f"id {record.id!r} was already used by {first}")
        except RowError as error:
            self._log(row, "malformed", "malformed", str(error))
            bad, allowed = self.dropped["malformed"].total(), self._preparation.skip_bad
            if bad > allowed:
                hint = f"this is bad row {bad}, and --skip-bad allows {allowed}"
                raise DataError(f"{row.where}: {error} ({hint})") from error
        except Ungradable as error:
            self._log(row, "ungradable", str(error))
        else:
            self._filter(record, row)

    def _log(self, row: Row, check: str, reason: str, detail: str = "", *, dropped: bool = True) -> None:
        """Log a finding: a check of :data:`CHECKS`, a reason shared by many rows, and a detail of this one."""
        (self.dropped if dropped else self.reported)[check][reason] += 1
        finding = {"file": row.file, "row": row.number, "check": check, "reason": reason, "detail": detail}
        # A row may hold a lone surrogate, which UTF-8 cannot encode.
        line = to_json_line({**finding, "dropped": dropped}).encode("utf-8", "backslashreplace")
        self._findings.write(line.decode("utf-8"))

    def _filter(self, record: Record, row: Row) -> None:
        preparation = self._preparation
        if preparation.source.outside is not None and (reason := preparation.source.outside(record)):
            self._log(row, "split", "not in the test split", reason)
            return
        for check, keep in preparation.filters.items():
            if (reason := keep(record)) is not None:
                self._log(row, check, reason)
                return
        if preparation.evaluation is not None and (overlap := preparation.evaluation.overlap(record)) is not None:
            self._log(row, "contamination", overlap.dataset, f"{overlap.record}: {overlap.passage}")
            return
        if preparation.gold == "off":
            self._keep(record, row)
            return
        self._unchecked.append((record, row))
        if len(self._unchecked) == _GOLD_BATCH:
            self.check_labels()

    def check_labels(self) -> None:
        """Check the gold answers of a batch (the last may be shorter), and keep the remaining records in order."""
        drop = self._preparation.gold == "drop"
        problems = self._preparation.check_labels([record for record, _ in self._unchecked])
        for (record, row), problem in zip(self._unchecked, problems, strict=True):
            if problem:
                self._log(row, "gold", problem, record.answer[:200], dropped=drop)
            if not (problem and drop):
                self._keep(record, row)
        self._unchecked.clear()

    def _keep(self, record: Record, row: Row) -> None:
        try:
            # Lone surrogates are not escaped: readers of records refuse them.
            line = (json.dumps(record_to_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (TypeError, ValueError) as error:
            self._log(row, "ungradable", "holds a value that JSON cannot represent", str(error))
            return
        if self._preparation.source.role == "training":
            answer = normalise_text(record.answer)
            first, earlier = self._questions.setdefault(normalise_text(record.question), (row.where, answer))
            if first != row.where:
                reason = "same gold answer" if earlier == answer else "another gold answer"
                self._log(row, "duplicate", reason, f"of {first}")
                return
        self.kept.append((record.id, self._lines.tell()))
        self._lines.write(line)


def _write(
    preparation: Preparation, kept: Sequence[tuple[str, int]], lines: IO[bytes], directory: Path
) -> dict[str, dict[str, Any]]:
    """Write the splits; a record's position depends on the seed and its id alone."""

    def drawn(index: int) -> bytes:
        identity = f"{preparation.seed}\0{kept[index][0]}"
        return blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def line(index: int) -> bytes:
        lines.seek(kept[index][1])
        return lines.readline()

    training = preparation.source.role == "training"
    held_out = round(preparation.validation * len(kept))
    drawn_order = sorted(range(len(kept)), key=drawn)
    splits = {"train" if training else "test": drawn_order[held_out:]}
    if preparation.validation:
        splits["validation"] = drawn_order[:held_out]
    outputs = {}
    for name, indices in splits.items():
        target = directory / f"{name}.jsonl"
        with target.open("wb") as out:
            out.writelines(map(line, indices if training else sorted(indices)))
        outputs[target.name] = {"rows": len(indices), "sha256": file_sha256(target)}
    return outputs
