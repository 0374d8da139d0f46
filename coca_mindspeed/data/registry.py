"""The data sets that ``coca-mindspeed data prepare`` knows by name, and where each is published."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coca_mindspeed.data.records import Record, record_from_json
from coca_mindspeed.data.sources import benchmarks, big_math, taco
from coca_mindspeed.data.sources.fields import RowError
from coca_mindspeed.errors import DataError


@dataclass(frozen=True, slots=True)
class Publication:
    """Where a data set is on the Hugging Face hub: repository, configuration and split."""

    repository: str
    configuration: str | None
    split: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """How one publisher's rows become records.

    Attributes:
        name: the data set's name, also in the records.
        role: ``training`` sets are cleaned and shuffled by default; ``benchmark`` sets are kept whole, in order.
        convert: makes a record of ``(row, number of the row from 0 over all files)``; raises
            :class:`~coca_mindspeed.data.sources.fields.RowError` or
            :class:`~coca_mindspeed.data.sources.fields.Ungradable`.
        hub: where ``--hub`` finds it; None if nowhere.
        columns: what ``convert`` reads; other columns of columnar files are not loaded.
        outside: why a record does not belong to the benchmark's split, or None if it does.
    """

    name: str
    role: Literal["training", "benchmark"]
    convert: Callable[[Mapping[str, Any], int], Record]
    hub: Publication | None = None
    columns: frozenset[str] | None = None
    outside: Callable[[Record], str | None] | None = None

    def header(self, path: Path) -> list[str] | None:
        """Column names of files that have no header line: OpenCompass's ``trivia-*.qa.csv``."""
        return ["question", "answer"] if self.name == "triviaqa" and path.name.endswith(".qa.csv") else None


def _own_record(row: Mapping[str, Any], number: int) -> Record:
    try:
        return record_from_json(row, "row", dataset="records", number=number)
    except DataError as error:
        raise RowError(str(error).removeprefix("row: ")) from error


_TRIVIAQA_COLUMNS = frozenset({"question", "question_id", "question_source", "answer"})
SOURCES = {
    source.name: source
    for source in (
        DataSource(
            "big_math",
            "training",
            big_math.big_math,
            Publication("SynthLabsAI/Big-Math-RL-Verified", None, "train"),
            big_math.COLUMNS,
        ),
        DataSource("taco", "training", taco.taco, Publication("BAAI/TACO", None, "train"), taco.COLUMNS),
        DataSource("gsm8k", "benchmark", benchmarks.gsm8k, Publication("openai/gsm8k", "main", "test")),
        DataSource("math500", "benchmark", benchmarks.math500, Publication("HuggingFaceH4/MATH-500", None, "test")),
        DataSource("aime24", "benchmark", benchmarks.aime24, Publication("HuggingFaceH4/aime_2024", None, "train")),
        DataSource("aime25", "benchmark", benchmarks.aime25, Publication("math-ai/aime25", None, "test")),
        DataSource(
            "mbpp_sanitized",
            "benchmark",
            benchmarks.mbpp_sanitized,
            Publication("google-research-datasets/mbpp", "sanitized", "test"),
            outside=benchmarks.outside_mbpp_test,
        ),
        DataSource(
            "humaneval", "benchmark", benchmarks.humaneval, Publication("openai/openai_humaneval", None, "test")
        ),
        DataSource("simpleqa", "benchmark", benchmarks.simpleqa, Publication("basicv8vc/SimpleQA", None, "test")),
        DataSource(
            "triviaqa",
            "benchmark",
            benchmarks.triviaqa,
            Publication("mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation"),
            _TRIVIAQA_COLUMNS,
        ),
        DataSource("records", "training", _own_record),
    )
}


def source_named(name: str) -> DataSource:
    """The data set called ``name``.

    Raises:
        DataError: there is none; the message lists those there are.
    """
    if name not in SOURCES:
        raise DataError(f"unknown data set {name!r}; expected one of {', '.join(SOURCES)}")
    return SOURCES[name]
