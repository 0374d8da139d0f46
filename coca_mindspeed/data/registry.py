"""Registry of the data sets of ``coca-mindspeed data prepare``, and the records of their published files."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from coca_mindspeed.data import published
from coca_mindspeed.data.formats import HubDataset, Row, data_files, file_format, hub_rows, read_rows
from coca_mindspeed.data.published import MissingColumnError, RowError
from coca_mindspeed.data.records import NAMED_COLUMNS, Record, read_records, record_from_json
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import is_hub_id
from coca_mindspeed.utils.text_formats import value_of


@dataclass(frozen=True, slots=True)
class DataSource:
    """Conversion of one source's rows into records.

    Attributes:
        role: ``training`` sets are cleaned and shuffled by default; ``benchmark`` sets are kept whole, in order.
        convert: see :mod:`.published`.
        hub: where ``--hub`` finds it, or None.
        columns: read by ``convert``; other columns of columnar files are not loaded.
        outside: why a record is not in the benchmark's split, or None if it is.
    """

    name: str
    role: Literal["training", "benchmark"]
    convert: Callable[[Mapping[str, Any], int], Record]
    hub: HubDataset | None = None
    columns: frozenset[str] | None = None
    outside: Callable[[Record], str | None] | None = None

    def rows(self, inputs: Sequence[Path] | HubDataset) -> Iterator[Row]:
        """Stream the rows of files, directories or a data set of the hub; raises DataError if they cannot be read."""
        if isinstance(inputs, HubDataset):
            yield from hub_rows(inputs, self.columns)
            return
        for path in data_files(inputs):
            yield from read_rows(path, self.columns)

    def record(self, row: Row, number: int) -> Record:
        """Convert a row; raises RowError, also for a row that cannot be read, or Ungradable."""
        if row.error:
            raise RowError(row.error)
        try:
            return replace(self.convert(row.values, number), where=row.where)
        except MissingColumnError as error:
            hint = f"; {NAMED_COLUMNS}" if self.name == "records" else ""
            names = ", ".join(map(repr, row.columns or row.values)) or "none"
            raise RowError(f"{error}; the row has {names}{hint}") from None


def _own_record(columns: Mapping[str, str], dataset: str, row: Mapping[str, Any], number: int) -> Record:
    """A user's row as a record; with ``columns``, other columns are not read."""
    values = published.mapped(columns, row) if columns else row
    try:
        return record_from_json(values, "row", dataset=dataset, number=number)
    except DataError as error:
        raise RowError(str(error).removeprefix("row: ")) from error


def rows_by_column(columns: Mapping[str, str], dataset: str = "records") -> DataSource:
    """The source ``records``, with the columns of a record's fields; without any, the rows are records."""
    read = frozenset(name for column in columns.values() for name in (column, column.partition(".")[0])) or None
    return DataSource("records", "training", partial(_own_record, columns, dataset), columns=read)


_TRIVIAQA_COLUMNS = frozenset({"question", "question_id", "question_source", "answer"})
_BIG_MATH = HubDataset("SynthLabsAI/Big-Math-RL-Verified", None, "train")
_AIME24 = HubDataset("HuggingFaceH4/aime_2024", None, "train")
_MBPP = HubDataset("google-research-datasets/mbpp", "sanitized", "test")
_HOTPOTQA = HubDataset("hotpotqa/hotpot_qa", "distractor", "validation")
_TRIVIAQA = HubDataset("mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation")
_SOURCES: tuple[DataSource, ...] = (
    DataSource("big_math", "training", published.big_math, _BIG_MATH, published.BIG_MATH_COLUMNS),
    DataSource("taco", "training", published.taco, HubDataset("BAAI/TACO", None, "train"), published.TACO_COLUMNS),
    DataSource("gsm8k", "benchmark", published.gsm8k, HubDataset("openai/gsm8k", "main", "test")),
    DataSource("math500", "benchmark", published.math500, HubDataset("HuggingFaceH4/MATH-500", None, "test")),
    DataSource("aime24", "benchmark", partial(published.aime, "aime24"), _AIME24),
    DataSource("aime25", "benchmark", partial(published.aime, "aime25"), HubDataset("math-ai/aime25", None, "test")),
    DataSource("mbpp_sanitized", "benchmark", published.mbpp_sanitized, _MBPP, outside=published.outside_mbpp_test),
    DataSource("humaneval", "benchmark", published.humaneval, HubDataset("openai/openai_humaneval", None, "test")),
    DataSource("simpleqa", "benchmark", published.simpleqa, HubDataset("basicv8vc/SimpleQA", None, "test")),
    DataSource("hotpotqa", "benchmark", published.hotpotqa, _HOTPOTQA),
    DataSource("triviaqa", "benchmark", published.triviaqa, _TRIVIAQA, _TRIVIAQA_COLUMNS),
    rows_by_column({}),
)
SOURCES = {source.name: source for source in _SOURCES}


def read_own(place: str, columns: Mapping[str, str]) -> list[Record]:
    """The records of a user's file in any format, or of a data set of the hub: ORG/NAME[:CONFIGURATION[:SPLIT]].

    Raises DataError with file, row and column.
    """
    path, on_hub = Path(place), is_hub_id(place)
    plain = path.suffix != ".gz" and file_format(path) in (None, ".jsonl")
    if plain and not columns and not on_hub:
        return list(read_records(path))
    source = rows_by_column(columns, place.partition(":")[0] if on_hub else path.stem)
    rows = hub_rows(hub_dataset(place), source.columns) if on_hub else source.rows([path])
    first_use: dict[str, str] = {}
    records = []
    for row in rows:
        try:
            record = source.record(row, row.number)
        except RowError as error:
            raise DataError(f"{row.where}: {error}") from error
        if record.id in first_use:
            raise DataError(f"{row.where}: id {record.id!r} was already used in {first_use[record.id]}")
        first_use[record.id] = row.where
        records.append(record)
    return records


def read_records_of(option: str, path: Path, columns: Mapping[str, str] | None = None) -> list[Record]:
    """The records of the file that an ``option`` names, in any format; DataError also if there are none."""
    records = read_own(str(path), columns or {})
    if not records:
        raise DataError(f"{option} {path}: holds no records")
    return records


# Usual names of the columns, the first one that a row has counts.
_QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input")
_ANSWERS = (
    "answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "expected_answer",
    "gold_answer",
    "gold",
    "labels",
    "label",
    "target",
    "solution",
    "output",
    "response",
)


def guess_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a user's row by the fields of a record, by their usual names; without those that are not found."""
    chat = next((name for name, value in row.items() if _is_chat(value)), None)
    question = next((name for name in _QUESTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
    answer = next((name for name in _ANSWERS if _is_scalar(value_of(row, name))), None)
    if chat is not None:
        question = None
        answer = None if row[chat][-1].get("role") == "assistant" else answer
    found = {"messages": chat, "question": question, "answer": answer}
    return {field: column for field, column in found.items() if column is not None}


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and "role" in turn for turn in turns)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def conversion_command(path: Path) -> str:
    """The command that converts a user's file into records, with the columns that its first row suggests."""
    try:
        row = next((dict(row.values) for row in read_rows(path)), {})
    except DataError:
        row = {}
    columns = {"question": "COLUMN", "answer": "COLUMN"} | guess_columns(row)
    if "messages" in columns:
        columns = {field: column for field, column in columns.items() if column != "COLUMN"}
    output = path.with_name(f"{path.name.partition('.')[0]}_records")
    command = ["coca-mindspeed", "data", "prepare", "records", "--columns", json.dumps(columns, ensure_ascii=False)]
    unread = [name for name in row if name not in {column.partition(".")[0] for column in columns.values()}]
    note = f"    # not read: {', '.join(unread)}" if unread else ""
    return shlex.join([*command, "--input", str(path), "--output", str(output)]) + note


def hub_dataset(named: str, split: str = "train") -> HubDataset:
    """The data set of ``ORG/NAME[:CONFIGURATION[:SPLIT]]``."""
    repository, _, rest = named.partition(":")
    configuration, _, named_split = rest.partition(":")
    return HubDataset(repository, configuration or None, named_split or split)
