"""Gold answers that can and cannot be graded against."""

import pytest

from coca_mindspeed.data.preparing.gold import gold_checker, math_gold_problems
from coca_mindspeed.data.records import Record


@pytest.mark.parametrize(
    "answer",
    [
        "42", "-3", "0.5", "1,000,000", "3/4", "\\frac{5}{6}", "\\frac12", "2\\sqrt{3}", "x^2+1", "\\pi", "(1, 2)",
        "[0, \\infty)", "\\{1, 2\\}", "50\\%", "10^{100}", "-\\infty", "\\text{even}", "x=3",
    ],
)  # fmt: skip
def test_answers_that_can_be_graded_against(answer):
    assert math_gold_problems([answer]) == [""]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "empty gold answer"),
        ("  ", "empty gold answer"),
        ("\\text{", "math-verify cannot parse"),
        ("9" * 2001, "longer than 2000 characters"),
    ],
)
def test_answers_that_cannot(answer, reason):
    (problem,) = math_gold_problems([answer])
    assert reason in problem


def test_code_needs_tests_and_factual_questions_an_answer():
    def record(category, answer="", **metadata):
        return Record("i", "d", category, "q", answer, None, metadata)

    check = gold_checker()
    assert check([record("code", tests={"kind": "stdio", "cases": [{"input": "", "output": ""}]})]) == [""]
    assert check([record("code", tests={"kind": "asserts", "code": "assert True", "entry_point": None})]) == [""]
    assert check([record("code", tests={"kind": "stdio", "cases": []})]) == [
        "tests['cases'] is empty, so that any program would pass"
    ]
    assert "metadata['tests'] should be an object, found NoneType" in check([record("code")])[0]
    assert "tests of kind 'pytest'; expected" in check([record("code", tests={"kind": "pytest"})])[0]
    assert check([record("factual", "Mars", aliases=["Mars"]), record("factual", aliases=["x"])]) == [
        "",
        "empty gold answer",
    ]
    assert "metadata['aliases'] should be a list" in check([record("factual", "Mars")])[0]
    assert "of category 'poetry' is not known" in check([record("poetry", "x")])[0]


def test_a_grader_takes_the_place_of_math_verify_for_mathematics_alone():
    asked = []

    def grader(golds):
        asked.append(list(golds))
        return ["too odd" if gold == "3" else "" for gold in golds]

    records = [
        Record(str(i), "d", category, "q", str(i), None, {"aliases": ["x"]})
        for i, category in enumerate(["math", "factual", "math", "math"])
    ]
    assert gold_checker(grader)(records) == ["", "", "", "too odd"]
    assert asked == [["0", "2", "3"]]
