"""Difficulty, source and length, with values at the edges, and gold answers that can and cannot be graded against."""

import pytest

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.data.filters import by_difficulty, by_length, by_source, label_checker, prompt_counter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader
from tests.tokenizers_for_tests import llama3_like, qwen_like


def record(question="q", **metadata):
    return Record("i", "d", "math", question, "1", None, metadata)


@pytest.mark.parametrize(
    ("difficulty", "reason"),
    [(0.0, "below 0.25"), (0.25, None), (0.5, None), (0.75, None), (0.7500001, "above 0.75"), (1, "above 0.75")],
)
def test_difficulty_is_closed_at_both_ends(difficulty, reason):
    assert by_difficulty(0.25, 0.75)(record(difficulty=difficulty)) == reason

    assert by_difficulty(0, 1)(record()) == "unknown"
    assert by_difficulty(0, 1, keep_unknown=True)(record()) is None


@pytest.mark.parametrize(
    ("include", "exclude", "source", "reason"),
    [("a", "", "a", None), ("a", "", "b", "b"), ("a", "", None, "unknown"), ("", "a", "a", "a"), ("", "a", None, None),
     ("a", "a", "a", "a")],
)  # fmt: skip
def test_source(include, exclude, source, reason):
    found = record() if source is None else record(source=source)
    assert by_source(set(include), set(exclude))(found) == reason


@pytest.mark.parametrize("kind", [qwen_like, llama3_like])
def test_length_counts_the_whole_prompt(tmp_path, kind):
    kind().save_pretrained(tmp_path)
    count, one = prompt_counter(tmp_path, CONFIDENCE_FIRST_PROMPT), record("What is 1 + 2?")
    messages = prompt_messages(one, CONFIDENCE_FIRST_PROMPT)
    rendered = kind().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    length = len(kind().encode(rendered, add_special_tokens=False))
    assert count(one) == length
    assert by_length(count, length, length)(one) is None
    assert by_length(count, 0, length - 1)(one) == f"prompt longer than {length - 1} tokens"
    assert by_length(count, length + 1, None)(one) == f"prompt shorter than {length + 1} tokens"


@pytest.fixture(scope="module")
def check():
    grader = MathGrader(workers=2)
    yield label_checker(grader.gold_problems)
    grader.close()


def graded(category, answer="", **metadata):
    return Record("i", "d", category, "q", answer, None, metadata)


def of_tests(kind, **tests):
    return graded("code", tests={"kind": kind, **tests})


@pytest.mark.parametrize(
    ("checked", "named"),
    [
        (of_tests("stdio", cases=[{"input": "", "output": ""}]), None),
        (of_tests("stdio", cases=[]), "tests['cases']"),
        (graded("code"), "metadata['tests']"),
        (of_tests("pytest"), "'pytest'"),
        (graded("factual", aliases=["x"]), "empty"),
        (graded("factual", "Mars"), None),
        (graded("poetry", "x"), "'poetry'"),
        (graded("math", "x", grader="maths"), "'math'"),
        (graded("math", " ", grader="exact"), "gold answer is empty"),
        (graded("math", "\\text{", grader="exact"), None),  # it need not be mathematics
    ],
)
def test_requirements_of_the_other_graders(check, checked, named):
    [problem] = check([checked])
    assert (problem == "") if named is None else (named in problem)
