"""Hashes of n-grams, and contamination against brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.filters import (
    SHORTEST,
    EvaluationIndex,
    Overlap,
    digest,
    ngram_hashes,
)
from coca_mindspeed.data.records import Record


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


def test_a_short_evaluation_question_counts_whole():
    index = EvaluationIndex(records(["What is the sum of 1 and 2", "What is 7?"]), 13)
    assert index.overlap(records(["Tell me: what is the sum of 1 and 2, and why?"])[0]).record == "eval-0"
    assert index.overlap(records(["What is 7 times 8?"])[0]) is None  # three words are too common to be a run
    assert index.overlap(records(["what is 7"])[0]).record == "eval-1"
