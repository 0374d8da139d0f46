"""The eight evaluation sets in every form in which they are published."""

import pytest

from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.registry import SOURCES, source_named
from coca_mindspeed.data.sources import benchmarks
from coca_mindspeed.data.sources.fields import RowError, Ungradable
from coca_mindspeed.data.sources.formats import read_rows
from coca_mindspeed.errors import DataError
from tests.data import source_rows

AIME24 = SOURCES["aime24"].convert


def test_the_papers_ten_data_sets_are_known():
    training = {name for name, source in SOURCES.items() if source.role == "training"}
    assert training == {"big_math", "taco", "records"}
    assert set(SOURCES) - training == {
        "gsm8k", "math500", "aime24", "aime25", "mbpp_sanitized", "humaneval", "simpleqa", "triviaqa",
    }  # fmt: skip
    with pytest.raises(DataError, match="'gsm9k', did you mean 'gsm8k'"):
        source_named("gsm9k")


def test_gsm8k():
    first, second = (benchmarks.gsm8k(row, i) for i, row in enumerate(source_rows.GSM8K))
    assert (first.id, first.category, first.answer) == ("gsm8k-0", "math", "1200")
    assert second.answer == "-5"


def test_math500():
    record = benchmarks.math500(source_rows.MATH500[0], 0)
    assert (record.id, record.answer) == ("test/prealgebra/1.json", "\\frac{5}{6}")
    assert record.metadata == {"source": "Prealgebra", "level": 2, "difficulty": 0.25}


@pytest.mark.parametrize("publisher", source_rows.AIME)
def test_aime_is_the_same_from_every_publisher(publisher):
    record = AIME24(source_rows.AIME[publisher], 4)
    assert (record.id, record.dataset, record.question, record.answer) == (
        "aime24-4", "aime24", "Find the number of widgets.", "25",
    )  # fmt: skip
    assert SOURCES["aime25"].convert(source_rows.AIME[publisher], 4).dataset == "aime25"


@pytest.mark.parametrize(
    ("answer", "expected"), [("000", "0"), ("007", "7"), ("$999$", "999"), (33.0, "33"), ("70°", "70")]
)
def test_aime_answers(answer, expected):
    assert AIME24({"problem": "q", "answer": answer}, 0).answer == expected


def test_mbpp_tests_run_and_are_shown():
    record = benchmarks.mbpp_sanitized(source_rows.mbpp_row(11), 0)
    tests = record.metadata["tests"]
    assert (tests["kind"], tests["entry_point"]) == ("asserts", None)
    exec(source_rows.mbpp_row(11)["code"] + "\n" + tests["code"], {})  # noqa: S102 - our own code
    *_, user = prompt_messages(record, None)
    assert user["content"].startswith("Write a function that adds 11 to a number.\n\nThe code has to pass these tests:")
    assert "assert add(1) == 12" in user["content"]
    assert "import math" not in user["content"]


def test_humaneval_tests_run_on_the_canonical_solution():
    row = source_rows.HUMANEVAL[0]
    record = benchmarks.humaneval(row, 0)
    assert (record.id, record.question) == ("HumanEval/0", row["prompt"])
    assert record.metadata["prompt"] == row["prompt"]
    assert record.metadata["tests"]["entry_point"] == "triple"
    exec(row["prompt"] + row["canonical_solution"] + record.metadata["tests"]["code"], {})  # noqa: S102 - our own code
    wrong = row["prompt"] + "    return n\n" + record.metadata["tests"]["code"]
    with pytest.raises(AssertionError):
        exec(wrong, {})  # noqa: S102 - our own code


def test_simpleqa():
    record = benchmarks.simpleqa(source_rows.SIMPLEQA[0], 0)
    assert (record.category, record.answer) == ("factual", "Nowhere, Province")
    assert record.metadata["grader"] == "simpleqa"
    assert (record.metadata["source"], record.metadata["answer_type"]) == ("Geography", "Place")


def test_triviaqa_from_the_hub_and_from_its_authors():
    hub = benchmarks.triviaqa(source_rows.TRIVIAQA_HUB, 0)
    authors = benchmarks.triviaqa(source_rows.TRIVIAQA_AUTHORS, 0)
    assert (hub.id, hub.question, hub.answer) == ("triviaqa-0", "Which planet is the red one?", "Mars")
    assert (authors.id, authors.question, authors.answer) == (hub.id, hub.question, hub.answer)
    assert hub.metadata["question_id"] == authors.metadata["question_id"] == "tc_1"
    assert hub.metadata["aliases"] == ["Mars", "Mars (planet)", "Planet Mars"]
    assert authors.metadata["aliases"] == [*hub.metadata["aliases"], "The planet Mars"]


def test_triviaqa_from_opencompass(tmp_path):
    path = tmp_path / "trivia-dev.qa.csv"
    path.write_text(source_rows.TRIVIAQA_OPENCOMPASS_LINE)
    (row,) = read_rows(path, header=SOURCES["triviaqa"].header(path))
    record = benchmarks.triviaqa(row.values, 0)
    assert (record.answer, record.metadata["aliases"]) == ("Mars", ["Mars", "Mars' surface"])
    assert SOURCES["triviaqa"].header(tmp_path / "other.csv") is None
    # The lists of its JSON Lines form need no parsing.
    assert benchmarks.triviaqa({"question": "q", "answer": ["a", "b"]}, 0).metadata["aliases"] == ["a", "b"]


UNLABELLED = {name: value for name, value in source_rows.TRIVIAQA_AUTHORS.items() if name != "Answer"}
# For each data set, rows and the words of the error; Ungradable where the row is well-formed.
REFUSED = [
    *(("gsm8k", {"question": "q", "answer": a}, RowError, "'answer'.*'#### '") for a in ("1200", "so\n####", "####  ")),
    *(("math500", {**source_rows.MATH500[0], "level": n}, RowError, "'level'") for n in (0, 6, 2.5, "2", True)),
    *(("aime24", {"problem": "q", "answer": a}, RowError, "0 to 999") for a in ("1000", "-1", "1/2", "12.5", "m+n")),
    ("mbpp_sanitized", source_rows.mbpp_row(test_list=[]), Ungradable, "no tests"),
    ("mbpp_sanitized", source_rows.mbpp_row(test_list="assert True"), RowError, "'test_list'.* found str"),
    ("mbpp_sanitized", {**source_rows.mbpp_row(), "task_id": "x"}, RowError, "'task_id'"),
    *(("simpleqa", {**source_rows.SIMPLEQA[0], "metadata": m}, RowError, "'metadata'") for m in ("{'topic'", "[1]")),
    *(
        ("triviaqa", {"question": "q", "answer": a}, Ungradable, "not labelled")
        for a in (None, {"value": "<unk>", "aliases": []}, {"Value": "", "Aliases": []})
    ),
    ("triviaqa", UNLABELLED, Ungradable, "not labelled"),
    ("triviaqa", {"question": "q"}, RowError, "'answer' or 'Answer' is missing"),
    *(
        ("triviaqa", {"question": "q", "answer": a}, RowError, message)
        for a, message in (
            ("Mars", "found str 'Mars'"),
            ("['Mars'", "should be a list of answers"),
            ([], "a value and aliases, or a list"),
            ([1], "aliases should be strings"),
            ({"aliases": ["a"]}, "'value' or 'Value' is missing"),
        )
    ),
]


@pytest.mark.parametrize(("name", "row", "error", "message"), REFUSED)
def test_rows_that_cannot_be_graded(name, row, error, message):
    with pytest.raises(error, match=message):
        SOURCES[name].convert(row, 0)
