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
    "answer",
    ["", "  ", "\\text{", "9" * 2001, "(" * 51 + "1" + ")" * 51],
    ids=["empty", "blank", "broken", "long", "deep"],
)
def test_answers_that_cannot(check, answer):
    readable, problem = check([record("math", "x^2"), record("math", answer)])
    assert readable == ""
    assert problem


def of_tests(kind, **tests):
    return record("code", tests={"kind": kind, **tests})


@pytest.mark.parametrize(
    ("checked", "named"),
    [
        (of_tests("stdio", cases=[{"input": "", "output": ""}]), None),
        (of_tests("asserts", code="assert f() == 1", entry_point=None), None),
        (of_tests("stdio", cases=[]), "tests['cases']"),
        (of_tests("asserts", code="assert True", entry_point=None), "program"),
        (record("code"), "metadata['tests']"),
        (of_tests("pytest"), "'pytest'"),
        (of_tests("stdio", cases=[{"input": "1", "output": 2}]), "'output'"),
        (of_tests("stdio", cases=["1"]), "'input'"),
        (of_tests("call", cases=[{"arguments": [1], "expected": 2}]), "tests['entry_point']"),
        (of_tests("asserts", code=["assert f()"]), "tests['code']"),
        (record("code", tests=["assert f()"]), "found list"),
        (record("code", tests={"kind": "asserts", "code": "f()"}, time_limit="2 s"), "metadata['time_limit']"),
        (record("factual", "Mars", aliases=["Mars"]), None),
        (record("factual", aliases=["x"]), "empty"),
        (record("factual", "Mars"), "metadata['aliases']"),
        (record("poetry", "x"), "'poetry'"),
        (record("math", "x", grader="maths"), "'math'"),
        (record("math", " ", grader="exact"), "gold answer is empty"),
        (record("math", "\\text{", grader="exact"), None),  # it need not be mathematics
    ],
)
def test_requirements_of_the_other_graders(check, checked, named):
    [problem] = check([checked])
    assert (problem == "") if named is None else (named in problem)


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
