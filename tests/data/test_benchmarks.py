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


@pytest.mark.parametrize("answer", ["1200", "so it is\n####", "####  "])
def test_gsm8k_without_a_gold_answer(answer):
    with pytest.raises(RowError, match="column 'answer' should end with '#### '"):
        benchmarks.gsm8k({"question": "q", "answer": answer}, 0)


def test_math500():
    record = benchmarks.math500(source_rows.MATH500[0], 0)
    assert (record.id, record.answer) == ("test/prealgebra/1.json", "\\frac{5}{6}")
    assert record.metadata == {"source": "Prealgebra", "level": 2, "difficulty": 0.25}


@pytest.mark.parametrize("level", [0, 6, 2.5, "2", True])
def test_math500_levels_are_one_to_five(level):
    with pytest.raises(RowError, match="column 'level' should be an integer from 1 to 5"):
        benchmarks.math500({**source_rows.MATH500[0], "level": level}, 0)


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


@pytest.mark.parametrize("answer", ["1000", "-1", "1/2", "12.5", "m+n"])
def test_aime_answers_that_cannot_be(answer):
    with pytest.raises(RowError, match="should be an integer from 0 to 999"):
        AIME24({"problem": "q", "answer": answer}, 0)


def test_mbpp_tests_run_and_are_shown():
    record = benchmarks.mbpp_sanitized(source_rows.mbpp_row(11), 0)
    tests = record.metadata["tests"]
    assert (tests["kind"], tests["entry_point"]) == ("asserts", None)
    exec(source_rows.mbpp_row(11)["code"] + "\n" + tests["code"], {})  # noqa: S102 - our own code
    *_, user = prompt_messages(record, None)
    assert user["content"].startswith("Write a function that adds 11 to a number.\n\nThe code has to pass these tests:")
    assert "assert add(1) == 12" in user["content"]
    assert "import math" not in user["content"]


@pytest.mark.parametrize(("task", "inside"), [(10, False), (11, True), (510, True), (511, False)])
def test_mbpp_test_split(task, inside):
    record = benchmarks.mbpp_sanitized(source_rows.mbpp_row(task), 0)
    assert (benchmarks.outside_mbpp_test(record) is None) == inside


def test_mbpp_without_tests_cannot_be_graded():
    with pytest.raises(Ungradable, match="no tests"):
        benchmarks.mbpp_sanitized(source_rows.mbpp_row(test_list=[]), 0)
    with pytest.raises(RowError, match="column 'test_list' should be a list of strings, found str"):
        benchmarks.mbpp_sanitized(source_rows.mbpp_row(test_list="assert True"), 0)
    with pytest.raises(RowError, match="column 'task_id' should be a number"):
        benchmarks.mbpp_sanitized({**source_rows.mbpp_row(), "task_id": "x"}, 0)


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
    for broken in ("{'topic'", "[1]"):
        with pytest.raises(RowError, match="column 'metadata' should be a dictionary"):
            benchmarks.simpleqa({**source_rows.SIMPLEQA[0], "metadata": broken}, 0)


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


@pytest.mark.parametrize("answer", [None, {"value": "<unk>", "aliases": []}, {"Value": "", "Aliases": []}])
def test_triviaqa_without_labels(answer):
    with pytest.raises(Ungradable, match="the test split is not labelled"):
        benchmarks.triviaqa({"question": "q", "answer": answer}, 0)


def test_triviaqa_rows_of_the_authors_test_files_have_no_answer_at_all():
    unlabelled = {name: value for name, value in source_rows.TRIVIAQA_AUTHORS.items() if name != "Answer"}
    with pytest.raises(Ungradable, match="the test split is not labelled"):
        benchmarks.triviaqa(unlabelled, 0)
    with pytest.raises(RowError, match="'answer' or 'Answer' is missing"):
        benchmarks.triviaqa({"question": "q"}, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("Mars", "should hold a value and aliases, or a list, found str 'Mars'"),
        ("['Mars'", "should be a list of answers"),
        ([], "should hold a value and aliases, or a list"),
        ([1], "aliases should be strings"),
        ({"aliases": ["a"]}, "column 'value' or 'Value' is missing"),
    ],
)
def test_triviaqa_answers_that_are_malformed(answer, message):
    with pytest.raises(RowError, match=message):
        benchmarks.triviaqa({"question": "q", "answer": answer}, 0)
