"""Registry of the data sets of ``coca-mindspeed data prepare``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from coca_mindspeed.data.records import Record, record_from_json
from coca_mindspeed.data.sources import benchmarks, training_sets
from coca_mindspeed.data.sources.fields import RowError
from coca_mindspeed.errors import DataError, nearest


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Location of a data set on the Hugging Face hub."""

    repository: str
    configuration: str | None
    split: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """Conversion of one source's rows into records.

    Attributes:
        role: ``training`` sets are cleaned and shuffled by default; ``benchmark`` sets are kept whole, in order.
        convert: (row, number of the row from 0 over all files) -> record; raises
            :class:`~coca_mindspeed.data.sources.fields.RowError` or
            :class:`~coca_mindspeed.data.sources.fields.Ungradable`.
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

    def header(self, path: Path) -> list[str] | None:
        """Return the column names of files without a header line: OpenCompass's ``trivia-*.qa.csv``."""
        return ["question", "answer"] if self.name == "triviaqa" and path.name.endswith(".qa.csv") else None


def _own_record(row: Mapping[str, Any], number: int) -> Record:
    try:
        return record_from_json(row, "row", dataset="records", number=number)
    except DataError as error:
        raise RowError(str(error).removeprefix("row: ")) from error


_TRIVIAQA_COLUMNS = frozenset({"question", "question_id", "question_source", "answer"})
_BIG_MATH = HubDataset("SynthLabsAI/Big-Math-RL-Verified", None, "train")
_AIME24 = HubDataset("HuggingFaceH4/aime_2024", None, "train")
_MBPP = HubDataset("google-research-datasets/mbpp", "sanitized", "test")
_TRIVIAQA = HubDataset("mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation")
_SOURCES: tuple[DataSource, ...] = (
    DataSource("big_math", "training", training_sets.big_math, _BIG_MATH, training_sets.BIG_MATH_COLUMNS),
    DataSource(
        "taco", "training", training_sets.taco, HubDataset("BAAI/TACO", None, "train"), training_sets.TACO_COLUMNS
    ),
    DataSource("gsm8k", "benchmark", benchmarks.gsm8k, HubDataset("openai/gsm8k", "main", "test")),
    DataSource("math500", "benchmark", benchmarks.math500, HubDataset("HuggingFaceH4/MATH-500", None, "test")),
    DataSource("aime24", "benchmark", partial(benchmarks.aime, "aime24"), _AIME24),
    DataSource("aime25", "benchmark", partial(benchmarks.aime, "aime25"), HubDataset("math-ai/aime25", None, "test")),
    DataSource("mbpp_sanitized", "benchmark", benchmarks.mbpp_sanitized, _MBPP, outside=benchmarks.outside_mbpp_test),
    DataSource("humaneval", "benchmark", benchmarks.humaneval, HubDataset("openai/openai_humaneval", None, "test")),
    DataSource("simpleqa", "benchmark", benchmarks.simpleqa, HubDataset("basicv8vc/SimpleQA", None, "test")),
    DataSource("triviaqa", "benchmark", benchmarks.triviaqa, _TRIVIAQA, _TRIVIAQA_COLUMNS),
    DataSource("records", "training", _own_record),
)
SOURCES = {source.name: source for source in _SOURCES}


def source_named(name: str) -> DataSource:
    """Return the data source called ``name``; raises DataError if there is none."""
    if name not in SOURCES:
        raise DataError(f"unknown data set {name!r}{nearest(name, SOURCES)}; expected one of {', '.join(SOURCES)}")
    return SOURCES[name]
