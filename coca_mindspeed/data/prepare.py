"""The preparation pipeline, in bounded memory: records are buffered on disk."""

import json
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from coca_mindspeed.data.filters import EvaluationIndex, ExactDuplicates, Filter, LabelChecker, digest
from coca_mindspeed.data.formats import HubDataset, Row
from coca_mindspeed.data.published import RowError, Ungradable
from coca_mindspeed.data.records import Record, record_to_json
from coca_mindspeed.data.registry import DataSource
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.directories import output_directory
from coca_mindspeed.utils.files import file_sha256
from coca_mindspeed.utils.json_files import to_json_line, write_json

# In the order of the pipeline.
STAGES = {
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


class FindingLog:
    """Writes each finding about a row as a line of JSON and counts them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.kept: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def close(self) -> None:
        self._file.close()

    def add(self, row: Row, stage: str, reason: str, detail: str = "", *, dropped: bool = True) -> None:
        """Add a finding: a stage of :data:`STAGES`, a reason shared by many rows, and a detail of this one."""
        (self.dropped if dropped else self.kept)[stage][reason] += 1
        finding = {"file": row.file, "row": row.number, "stage": stage, "reason": reason, "detail": detail}
        # A row may hold a lone surrogate, which UTF-8 cannot encode.
        line = to_json_line({**finding, "dropped": dropped}).encode("utf-8", "backslashreplace")
        self._file.write(line.decode("utf-8"))


def sorted_counts(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Order stages as in the pipeline, and the reasons of each by falling count."""
    return {
        stage: dict(sorted(counts[stage].items(), key=lambda item: (-item[1], item[0])))
        for stage in STAGES
        if stage in counts
    }


@dataclass(frozen=True, slots=True)
class PreparationReport:
    """Result of :func:`prepare`; ``dropped`` and ``reported`` (kept) are of :func:`sorted_counts`."""

    dataset: str
    rows_in: int
    rows_out: int
    dropped: Mapping[str, Mapping[str, int]]
    reported: Mapping[str, Mapping[str, int]]
    outputs: Mapping[str, Mapping[str, Any]]
    inputs: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


class RecordBuffer:
    """Records appended to a temporary file; ``rows`` are the rows that they were made from, without values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._offsets = array("Q", [0])
        self.rows: list[Row] = []

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def append(self, line: bytes, row: Row) -> None:
        """Add a record's JSON line, made from ``row``."""
        self._file.seek(self._offsets[-1])
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        self.rows.append(Row(row.file, row.number))

    def line(self, index: int) -> bytes:
        self._file.seek(self._offsets[index])
        return self._file.readline()


GoldMode = Literal["drop", "report", "off"]
_GOLD_BATCH = 512  # records
_REPORTED = ("skip_bad", "gold", "drop_duplicates", "validation", "shuffle", "seed")


@dataclass(frozen=True, slots=True)
class Preparation:
    """All settings that decide the output.

    Attributes:
        skip_bad: number of malformed rows to skip; one more stops the run.
        filters: stage of the report -> filter.
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
    drop_duplicates: bool = True
    validation: float = 0.0
    shuffle: bool = True
    seed: int = 0
    described: dict[str, Any] = field(default_factory=dict)


def prepare(
    preparation: Preparation, output: Path, overwrite: bool = False, on_row: Callable[[], None] = lambda: None
) -> PreparationReport:
    """Prepare a data set into the directory ``output``, atomically.

    It holds ``train.jsonl`` (``test.jsonl`` for a benchmark), optionally ``validation.jsonl``, ``findings.jsonl``
    and ``report.json``.  The same input and options give the same bytes.  ``on_row`` is called after
    each row.

    Raises:
        DataError: an input cannot be read, too many rows are malformed, no row is left, or the output exists.
    """
    with (
        output_directory(output, overwrite) as directory,
        closing(RecordBuffer(directory / "buffer")) as records,
        closing(FindingLog(directory / "findings.jsonl")) as log,
    ):
        cleaning = _Cleaning(preparation, records, log)
        for row in preparation.source.rows(preparation.inputs):
            cleaning.take(row)
            on_row()
        cleaning.check_labels()
        if not records.rows:
            reasons = [f"{stage}: {counts.total()}" for stage, counts in log.dropped.items()]
            why = ", ".join(reasons) or "the input has no rows"
            raise DataError(f"{preparation.source.name}: no row is left of {cleaning.rows_in}: {why}")
        outputs = _write(preparation, records, directory)
        report = PreparationReport(
            dataset=preparation.source.name,
            rows_in=cleaning.rows_in,
            rows_out=sum(int(output["rows"]) for output in outputs.values()),
            dropped=sorted_counts(log.dropped),
            reported=sorted_counts(log.kept),
            outputs=outputs,
            inputs=cleaning.inputs(),
            options={name: getattr(preparation, name) for name in _REPORTED} | preparation.described,
        )
        write_json(directory / "report.json", asdict(report))
    return report


class _Cleaning:
    """First pass: buffer records row by row, and log dropped rows."""

    def __init__(self, preparation: Preparation, records: RecordBuffer, log: FindingLog) -> None:
        self._preparation, self._records, self._log = preparation, records, log
        self._files: Counter[str] = Counter()  # rows of each file, in order
        self._ids: dict[int, tuple[str, int]] = {}
        self._exact = ExactDuplicates()
        self._unchecked: list[tuple[Record, Row]] = []
        self._bad = 0
        self.rows_in = 0

    def take(self, row: Row) -> None:
        """Buffer the row's record, or log why it is dropped."""
        number = self.rows_in
        self.rows_in += 1
        self._files[row.file] += 1
        try:
            record = self._preparation.source.record(row, number)
            self._check_id(record, row)
        except RowError as error:
            self._bad += 1
            if self._bad > self._preparation.skip_bad:
                hint = f"this is bad row {self._bad}, and --skip-bad allows {self._preparation.skip_bad}"
                raise DataError(f"{row.where}: {error} ({hint})") from error
            self._log.add(row, "malformed", "malformed", str(error))
        except Ungradable as error:
            self._log.add(row, "ungradable", str(error))
        else:
            self._filter(record, row)

    def _check_id(self, record: Record, row: Row) -> None:
        place = (sys.intern(row.file), row.number)
        key = digest(record.id)  # keeps the table small; 64 bits do not collide in any data set that fits on a disk
        if (first := self._ids.setdefault(key, place)) != place:
            raise RowError(f"id {record.id!r} was already used by {first[0]}:{first[1]}")

    def _filter(self, record: Record, row: Row) -> None:
        preparation = self._preparation
        if preparation.source.outside is not None and (reason := preparation.source.outside(record)):
            self._log.add(row, "split", "not in the test split", reason)
            return
        for stage, keep in preparation.filters.items():
            if (reason := keep(record)) is not None:
                self._log.add(row, stage, reason)
                return
        if preparation.evaluation is not None and (overlap := preparation.evaluation.overlap(record)) is not None:
            self._log.add(row, "contamination", overlap.dataset, f"{overlap.record}: {overlap.passage}")
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
                self._log.add(row, "gold", problem, record.answer[:200], dropped=drop)
            if not (problem and drop):
                self._keep(record, row)
        self._unchecked.clear()

    def _keep(self, record: Record, row: Row) -> None:
        try:
            # Lone surrogates are not escaped: readers of records refuse them.
            line = (json.dumps(record_to_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (TypeError, ValueError) as error:
            self._log.add(row, "ungradable", "holds a value that JSON cannot represent", str(error))
            return
        if (
            self._preparation.drop_duplicates
            and (first := self._exact.first(record, len(self._records.rows))) is not None
        ):
            earlier, same_answer = first
            reason = "same gold answer" if same_answer else "another gold answer"
            self._log.add(row, "duplicate", reason, f"of {self._records.rows[earlier].where}")
            return
        self._records.append(line, row)

    def inputs(self) -> list[dict[str, Any]]:
        """Name, rows and SHA-256 of each file read."""
        local = not isinstance(self._preparation.inputs, HubDataset)
        return [
            {"file": file, "rows": rows, "sha256": file_sha256(Path(file)) if local else None}
            for file, rows in self._files.items()
        ]


def _write(preparation: Preparation, records: RecordBuffer, directory: Path) -> dict[str, dict[str, Any]]:
    """Write the splits; a record's position depends on the seed and its id alone."""

    def drawn(index: int) -> bytes:
        identity = f"{preparation.seed}\0{json.loads(records.line(index))['id']}"
        return blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    kept = range(len(records.rows))
    held_out = round(preparation.validation * len(kept))
    shuffled = sorted(kept, key=drawn) if preparation.shuffle or held_out else list(kept)
    splits = {"train" if preparation.source.role == "training" else "test": shuffled[held_out:]}
    if preparation.validation:
        splits["validation"] = shuffled[:held_out]
    outputs = {}
    for name, indices in splits.items():
        target = directory / f"{name}.jsonl"
        with target.open("wb") as out:
            out.writelines(map(records.line, indices if preparation.shuffle else sorted(indices)))
        outputs[target.name] = {"rows": len(indices), "sha256": file_sha256(target)}
    return outputs
