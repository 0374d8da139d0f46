"""Gold answers that can and cannot be graded against."""

import pytest

from coca_mindspeed.data.prepare.filters import label_checker
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader


@pytest.fixture(scope="module")
def check():
    grader = MathGrader(workers=2)
    yield label_checker(grader.gold_problems)
    grader.close()


def record(category, answer="", **metadata):
    return Record("i", "d", category, "q", answer, None, metadata)


@pytest.mark.parametrize(
    "answer",
    [
        "42", "-3", "0.5", "1,000,000", "3/4", "\\frac{5}{6}", "\\frac12", "2\\sqrt{3}", "x^2+1", "\\pi", "(1, 2)",
        "[0, \\infty)", "\\{1, 2\\}", "50\\%", "10^{100}", "-\\infty", "\\text{even}", "x=3",
    ],
)  # fmt: skip
def test_answers_that_can_be_graded_against(check, answer):
    assert check([record("math", answer)]) == [""]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("\\text{", "it cannot be parsed as mathematics"),
        ("9" * 2001, "over 2000 characters"),
        ("(" * 51 + "1" + ")" * 51, "more than 50 deep"),
    ],
)
def test_answers_that_cannot(check, answer, reason):
    readable, problem, other = check([record("math", "x^2"), record("math", answer), record("factual", answer)])
    assert readable == ""
    assert reason in problem
    assert "metadata['aliases'] should be a list" in other


def test_code_needs_tests_and_factual_questions_an_answer(check):
    assert check([record("code", tests={"kind": "stdio", "cases": [{"input": "", "output": ""}]})]) == [""]
    assert check([record("code", tests={"kind": "asserts", "code": "assert f() == 1", "entry_point": None})]) == [""]
    assert check([record("code", tests={"kind": "stdio", "cases": []})]) == [
        "tests['cases'] is empty, so that any program would pass"
    ]
    unused = check([record("code", tests={"kind": "asserts", "code": "assert True", "entry_point": None})])
    assert "uses nothing of the program's" in unused[0]
    assert "metadata['tests'] should be an object, found NoneType" in check([record("code")])[0]
    assert "tests of kind 'pytest'; expected" in check([record("code", tests={"kind": "pytest"})])[0]
    assert check([record("factual", "Mars", aliases=["Mars"]), record("factual", aliases=["x"])]) == [
        "",
        "empty gold answer",
    ]
    assert "metadata['aliases'] should be a list" in check([record("factual", "Mars")])[0]
    assert "of category 'poetry' is not known" in check([record("poetry", "x")])[0]


def test_only_gold_answers_of_mathematics_are_parsed_and_all_of_a_batch_at_once():
    asked = []

    def grader(golds):
        asked.append(list(golds))
        return ["too odd" if gold == "3" else "" for gold in golds]

    records = [
        Record(str(i), "d", category, "q", str(i), None, {"aliases": ["x"]})
        for i, category in enumerate(["math", "factual", "math", "math"])
    ]
    assert label_checker(grader)(records) == ["", "", "", "too odd"]
    assert asked == [["0", "2", "3"]]
