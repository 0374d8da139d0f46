"""Exact duplicates, near duplicates and contamination against brute force."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.prepare.deduplication import (
    SHORTEST,
    EvaluationIndex,
    NearDuplicates,
    Overlap,
    bands_for,
    digest,
    ngram_hashes,
    normalise,
    numbers,
    tokens,
)
from coca_mindspeed.data.records import Record


def near_duplicates(records, threshold):
    search = NearDuplicates(threshold)
    for record in records:
        search.add(record)
    return search.repeats(lambda index: records[index].question)


def question(text, answer="1"):
    return Record(text[:20], "d", "math", text, answer)


def test_hashes_are_the_same_on_every_machine_and_in_every_run():
    assert digest("") == 0xE4A6A0577479B2B4  # BLAKE2b-64 of nothing
    assert ngram_hashes(["a", "b", "c"], 2).tolist() == ngram_hashes(["a", "b", "c"], 2).tolist()
    assert len(set(ngram_hashes(["a", "b", "a"], 2).tolist())) == 2  # order counts


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 5))
def test_ngram_hashes_are_equal_exactly_where_ngrams_are(units, n):
    hashes = ngram_hashes(units, n)
    length = max(1, min(n, len(units)))
    grams = [tuple(units[i : i + length]) for i in range(max(0, len(units) - length + 1))] if units else []
    assert len(hashes) == len(grams)
    for i, left in enumerate(grams):
        for j, right in enumerate(grams):
            assert (hashes[i] == hashes[j]) == (left == right)


@pytest.mark.parametrize("threshold", [0.4, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_bands_find_999_of_1000_pairs_at_the_threshold(threshold):
    bands, rows = bands_for(threshold)
    assert bands * rows <= 120
    assert 1 - (1 - threshold**rows) ** bands >= 0.999
    if threshold < 1:  # and are as selective as they can be
        longer = rows + 1
        assert 1 - (1 - threshold**longer) ** (120 // longer) < 0.999


def templates(seed, number):
    """Questions of which many are one or two words apart."""
    rng = random.Random(seed)
    vocabulary = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(26) for j in range(10)]
    bases = [[rng.choice(vocabulary) for _ in range(rng.randint(4, 50))] for _ in range(number // 4)]
    records = []
    for index in range(number):
        changed = list(rng.choice(bases))
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            changed[rng.randrange(len(changed))] = rng.choice([*vocabulary, "1", "2"])
        records.append(Record(str(index), "d", "math", " ".join(changed), rng.choice("12")))
    return records


def brute_force(records, threshold):
    """Greedy removal over all pairs, on sets of token triples."""

    def parts(record):
        units = tokens(normalise(record.question))
        n = max(1, min(3, len(units)))
        grams = {tuple(units[i : i + n]) for i in range(len(units) - n + 1)}
        return grams, numbers(record.question), record.answer

    kept, found = {}, {}
    for index, record in enumerate(records):
        mine, *same = parts(record)
        for earlier, (theirs, *others) in kept.items():
            if same == others and len(mine & theirs) / len(mine | theirs) >= threshold:
                found[index] = earlier
                break
        else:
            kept[index] = (mine, *same)
    return found


@pytest.mark.parametrize("threshold", [0.6, 0.8, 1.0])
def test_near_duplicates_equal_brute_force(threshold):
    records = templates(seed=int(threshold * 10), number=600)
    found = near_duplicates(records, threshold)
    expected = brute_force(records, threshold)
    assert len(expected) > 10
    # The search is exact in what it reports and may miss one pair in a thousand.
    assert all(similarity >= threshold for _, similarity in found.values())
    assert {index: earlier for index, (earlier, _) in found.items()} == expected


LONG = "A farmer has a field of wheat and sells every bushel of it at the market for a price of {} coins a bushel"


@pytest.mark.parametrize(
    ("other", "answer", "repeats"),
    [
        (LONG.format(30).replace("farmer", "grower"), "1", True),
        (LONG.format(30).replace("  ", " ").upper(), "1", True),
        (LONG.format(31), "1", False),  # other numbers: another question
        (LONG.format(30).replace("farmer", "grower"), "2", False),  # another gold answer: another question
    ],
)
def test_only_the_same_numbers_and_answer_make_near_duplicates(other, answer, repeats):
    found = near_duplicates([question(LONG.format(30)), question(other, answer)], 0.7)
    assert found.keys() == ({1} if repeats else set())


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


@settings(max_examples=300, deadline=None)
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
