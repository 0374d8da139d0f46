"""Published rows become the records they should, or an error that names the column."""

import json

import pytest

from coca_mindspeed.data import published
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.published import RowError, Ungradable, big_math, taco
from coca_mindspeed.data.records import Record
from coca_mindspeed.data.registry import SOURCES
from tests.data import source_rows
from tests.data.source_rows import BIG_MATH, TACO_CALL, taco_row
from tests.tables import read_table


def test_big_math_row():
    metadata = {"source": "orca_math", "domain": ["Mathematics -> Algebra -> Prealgebra"]}
    metadata |= {"solve_rate": 0.90625, "difficulty": 0.09375}
    expected = Record("big_math-7", "big_math", "math", "What is $3^4$?", "81", None, metadata)
    assert big_math(BIG_MATH[0], 7) == expected
    assert big_math(BIG_MATH[1], 8).metadata == {"source": "olympiads"}
    assert "difficulty" not in big_math({**BIG_MATH[0], "llama8b_solve_rate": float("nan")}, 0).metadata
    for answer, text in ((81, "81"), (81.0, "81"), (0.1, "0.1")):
        assert big_math({**BIG_MATH[0], "answer": answer}, 0).answer == text
    *_, user = prompt_messages(big_math(BIG_MATH[0], 0), None)
    assert user["content"] == "What is $3^4$? Please reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(("source", "fate", "named", "row"), read_table(__file__, "refused_rows.tsv"))
def test_rows_that_are_refused(source, fate, named, row):
    with pytest.raises(Ungradable if fate == "ungradable" else RowError, match=named):
        SOURCES[source].convert(json.loads(row), 0)


def test_taco_stdin_row():
    record = taco(taco_row(), 3)
    assert (record.id, record.dataset, record.category, record.answer) == ("taco-3", "taco", "code", "")
    assert record.metadata["tests"] == {
        "kind": "stdio",
        "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "-5 5\n", "output": "0\n"}],
    }
    assert record.metadata["difficulty"] == 0.25
    assert record.metadata["time_limit"] == 2.0
    assert record.metadata["source"] == "codeforces"
    assert "standard input" in record.metadata["instruction"]


def test_taco_call_row():
    record = taco(TACO_CALL, 0)
    assert record.metadata["tests"] == {
        "kind": "call",
        "entry_point": "double",
        "cases": [{"arguments": [2], "expected": 4}, {"arguments": [-7], "expected": -14}],
    }
    assert record.metadata["difficulty"] == 0.0
    assert "time_limit" not in record.metadata
    *_, user = prompt_messages(record, None)
    assert user["content"].startswith("Write a function that doubles a number.\n\nWrite it in Python")
    assert "```python\ndef double(n):\n```" in user["content"]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([[4], [-14]], [4, -14]),  # every output wrapped: unwrapped
        ([4, -14], [4, -14]),  # none wrapped
        ([[4], [1, 2]], [[4], [1, 2]]),  # lists of several lengths are values
        ([[[4]], [[5]]], [[4], [5]]),  # one wrapping is taken off, not two
        ([[4], []], [[4], []]),
    ],
)
def test_taco_expected_values_lose_one_wrapping_or_none(outputs, expected):
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}
    record = taco(taco_row(input_output=json.dumps(tests)), 0)
    assert [case["expected"] for case in record.metadata["tests"]["cases"]] == expected
    assert "a Python function named f" in record.metadata["instruction"]


def test_taco_tests_with_a_number_that_no_reader_takes():
    with pytest.raises(Ungradable, match="digits"):
        taco(taco_row(input_output=f'{{"inputs": [{"1" * 5000}], "outputs": ["x"]}}'), 0)


AIME24 = SOURCES["aime24"].convert


@pytest.mark.parametrize(
    ("name", "row", "answer", "metadata"),
    [
        ("gsm8k", source_rows.GSM8K[0], "1200", {}),
        ("gsm8k", source_rows.GSM8K[1], "-5", {}),
        ("math500", source_rows.MATH500[0], r"\frac{5}{6}", {"source": "Prealgebra", "level": 2, "difficulty": 0.25}),
        ("simpleqa", source_rows.SIMPLEQA[0], "Nowhere, Province", {"grader": "simpleqa"}),
        *(("aime24", {"problem": "q", "answer": written}, read, {})
          for written, read in (("000", "0"), ("007", "7"), ("$999$", "999"), (33.0, "33"), ("70°", "70"))),
    ],
)  # fmt: skip
def test_answers_and_metadata(name, row, answer, metadata):
    record = SOURCES[name].convert(row, 0)
    assert (record.answer, {key: record.metadata.get(key) for key in metadata}) == (answer, metadata)


@pytest.mark.parametrize("publisher", source_rows.AIME)
def test_aime_is_the_same_from_every_publisher(publisher):
    record = AIME24(source_rows.AIME[publisher], 4)
    assert (record.id, record.dataset, record.question, record.answer) == (
        "aime24-4", "aime24", "Find the number of widgets.", "25",
    )  # fmt: skip
    assert SOURCES["aime25"].convert(source_rows.AIME[publisher], 4).dataset == "aime25"


def test_mbpp_tests_run_and_are_shown():
    record = published.mbpp_sanitized(source_rows.mbpp_row(11), 0)
    tests = record.metadata["tests"]
    assert (tests["kind"], tests["entry_point"]) == ("asserts", None)
    exec(source_rows.mbpp_row(11)["code"] + "\n" + tests["code"], {})  # noqa: S102 - our own code
    *_, user = prompt_messages(record, None)
    assert user["content"].startswith("Write a function that adds 11 to a number.\n\nThe code has to pass these tests:")
    assert "assert add(1) == 12" in user["content"]
    assert "import math" not in user["content"]


def test_humaneval_tests_run_on_the_canonical_solution():
    row = source_rows.HUMANEVAL[0]
    record = published.humaneval(row, 0)
    assert (record.id, record.question) == ("HumanEval/0", row["prompt"])
    assert record.metadata["prompt"] == row["prompt"]
    assert record.metadata["tests"]["entry_point"] == "triple"
    exec(row["prompt"] + row["canonical_solution"] + record.metadata["tests"]["code"], {})  # noqa: S102 - our own code
    wrong = row["prompt"] + "    return n\n" + record.metadata["tests"]["code"]
    with pytest.raises(AssertionError):
        exec(wrong, {})  # noqa: S102 - our own code


def test_hotpotqa_from_the_hub_and_from_its_authors():
    hub, authors = (published.hotpotqa(row, 0) for row in (source_rows.HOTPOTQA_HUB, source_rows.HOTPOTQA_AUTHORS))
    assert hub == authors
    question = "Are both planets in the solar system?"
    assert hub.question == f"Mars: Mars is a planet. It is red.\n\nVenus: Venus is a planet.\n\n{question}"
    assert (hub.id, hub.answer, hub.metadata["kind"]) == ("5a7a06935542990198eaf050", "yes", "comparison")
    assert published.hotpotqa({**source_rows.HOTPOTQA_HUB, "context": None}, 0).question == question


def test_triviaqa_from_the_hub_and_from_its_authors():
    hub = published.triviaqa(source_rows.TRIVIAQA_HUB, 0)
    authors = published.triviaqa(source_rows.TRIVIAQA_AUTHORS, 0)
    assert (hub.id, hub.question, hub.answer) == ("triviaqa-0", "Which planet is the red one?", "Mars")
    assert (authors.id, authors.question, authors.answer) == (hub.id, hub.question, hub.answer)
    assert hub.metadata["question_id"] == authors.metadata["question_id"] == "tc_1"
    assert hub.metadata["aliases"] == ["Mars", "Mars (planet)", "Planet Mars"]
    assert authors.metadata["aliases"] == [*hub.metadata["aliases"], "The planet Mars"]
