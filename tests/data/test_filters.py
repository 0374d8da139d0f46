"""Difficulty, source and length at the edges, gold answers that cannot be graded against, contamination."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.data.filters import (
    SHORTEST,
    EvaluationIndex,
    ExactDuplicates,
    Overlap,
    by_difficulty,
    by_length,
    by_source,
    digest,
    ngram_hashes,
    prompt_counter,
)
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.labels import label_checker
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
    assert by_length(count, length)(one) is None
    assert by_length(count, length - 1)(one) == f"prompt longer than {length - 1} tokens"


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


def test_hashes_are_the_same_on_every_machine_and_in_every_run():
    assert digest("") == 0xE4A6A0577479B2B4  # BLAKE2b-64 of nothing
    assert ngram_hashes(["a", "b", "c"], 2).tolist() == ngram_hashes(["a", "b", "c"], 2).tolist()
    assert len(set(ngram_hashes(["a", "b", "a"], 2).tolist())) == 2  # order counts


def records(texts, dataset="eval"):
    return [Record(f"{dataset}-{i}", dataset, "math", text, "1") for i, text in enumerate(texts)]


def contaminated(question, evaluation, n):
    """The rule, word for word."""

    def runs(words, length):
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    words = question.split()
    for other in (text.split() for text in evaluation):
        if words and words == other:
            return True
        length = min(n, len(other))
        if len(other) >= SHORTEST and runs(words, length) & runs(other, length):
            return True
    return False


SENTENCES = st.lists(st.sampled_from(["a", "b"]), max_size=14).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.lists(SENTENCES.filter(bool), max_size=4), SENTENCES.filter(bool), st.integers(SHORTEST, 9))
def test_equals_brute_force(evaluation, question, n):
    overlap = EvaluationIndex(records(evaluation), n).overlap(records([question])[0])
    assert (overlap is not None) == contaminated(question, evaluation, n)
    if overlap is not None:
        owner = evaluation[int(overlap.record.removeprefix("eval-"))]
        assert overlap.passage in question
        assert overlap.passage in owner


TRAIN = "A train leaves the station at noon and travels north at sixty miles an hour until it stops"


def test_symbols_case_and_white_space_do_not_hide_a_passage():
    index = EvaluationIndex(records([TRAIN], "gsm8k"), 13)
    hidden = "Warm-up!\n(a) a TRAIN leaves the station, at noon -- and travels *north* at sixty miles / hour."
    assert index.overlap(records([hidden])[0]) == Overlap(
        "gsm8k", "gsm8k-0", "a train leaves the station at noon and travels north at sixty miles"
    )


@pytest.mark.parametrize(
    ("question", "repeated"),
    [
        ("What is 2²?", True), ("what\u200b is  ２²?", True), ("What is 22?", False), ("What is 2₂?", False),
        ("What is 2½?", False),
    ],
)  # fmt: skip
def test_a_repeated_question_looks_the_same(question, repeated):
    found = ExactDuplicates()
    assert found.first(Record("a", "mine", "math", "What is 2²?", "4"), 0) is None
    assert (found.first(Record("b", "mine", "math", question, "４"), 1) == (0, True)) is repeated
