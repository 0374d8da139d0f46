"""Big-Math and TACO: each publisher's row becomes the record it should, or an error that names the column."""

import json

import pytest

from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.data.sources.fields import RowError, Ungradable
from coca_mindspeed.data.sources.training_sets import big_math, taco
from tests.data.source_rows import BIG_MATH, TACO_CALL, taco_row


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


@pytest.mark.parametrize(
    ("convert", "changes", "named"),
    [
        *(
            (lambda changes: big_math({**BIG_MATH[0], **changes}, 0), {column: value}, column)
            for column, values in {
                "problem": (None, " \n"),
                "answer": ("", ["81"], True, float("inf")),
                "llama8b_solve_rate": (64, "0.5"),
            }.items()
            for value in values
        ),
        *(
            (lambda changes: taco(taco_row(**changes), 0), {column: value}, named)
            for column, value, named in (
                ("input_output", "{", "input_output"),
                ("input_output", "[1]", "found list"),
                ("input_output", '{"inputs": ["1"], "outputs": []}', "lists of one length"),
                ("input_output", '{"inputs": [1], "outputs": ["1"]}', "found int 1"),
                ("input_output", '{"fn_name": 3, "inputs": [1], "outputs": [1]}', "fn_name"),
                ("difficulty", "IMPOSSIBLE", "difficulty"),
                ("time_limit", "soon", "time_limit"),
                ("tags", "[1]", "tags"),
                ("tags", "['a'", "tags"),
                ("starter_code", 3, "starter_code"),
                ("question", "", "question"),
            )
        ),
        (lambda row: big_math(row, 0), {"problem": "q", "answer": "a"}, "llama8b_solve_rate' is missing"),
    ],
)
def test_malformed_rows(convert, changes, named):
    with pytest.raises(RowError, match=named):
        convert(changes)


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
    assert record.metadata["tags"] == ["Implementation", "Mathematics"]
    assert "skill_types" not in record.metadata
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


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("", "no tests"),
        (json.dumps({"inputs": [], "outputs": []}), "no tests"),
        (json.dumps({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [1]}), "integer keys"),
        (json.dumps({"inputs": ["1" * 5000], "outputs": ["x"]}).replace('"' + "1" * 5000 + '"', "1" * 5000), "digits"),
    ],
)
def test_taco_rows_that_nothing_can_grade(tests, message):
    with pytest.raises(Ungradable, match=message):
        taco(taco_row(input_output=tests), 0)


def test_taco_lists_of_lines_and_an_unknown_difficulty():
    tests = json.dumps({"inputs": [["1", "2"]], "outputs": ["3"]})
    metadata = taco(taco_row(input_output=tests, difficulty="UNKNOWN_DIFFICULTY"), 0).metadata
    assert metadata["tests"]["cases"] == [{"input": "1\n2", "output": "3"}]
    assert "difficulty" not in metadata
    for written, seconds in (("1 second", 1.0), ("0.5 s", 0.5), ("3", 3.0), (4, 4.0)):
        assert taco(taco_row(time_limit=written), 0).metadata["time_limit"] == seconds
