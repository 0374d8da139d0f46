"""Facts with aliases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.data.facts import normalise_fact
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.factual import FactualGrader, names_answer, stated_fact
from coca_mindspeed.grading.verdict import ExactGrader, Outcome
from tests.grading.tables import read_table, text_cases
from tests.tables import check_rows


def record(aliases):
    return Record("t1", "triviaqa", "factual", "Who?", "", metadata={"aliases": aliases})


FUNCTIONS = {"normalise": normalise_fact, "stated_fact": stated_fact}


def test_the_table_of_texts():
    def check(function, text, expected):
        assert FUNCTIONS[function](text) == expected

    check_rows(check, text_cases(*FUNCTIONS))


def test_the_table_of_facts():
    def check(aliases, answer, exact, contains):
        for grader, expected in ((FactualGrader("exact"), exact), (FactualGrader("contains"), contains)):
            [verdict] = grader.grade([record(aliases.split(" | "))], [answer])
            assert verdict.correct is (expected == "true")

    check_rows(check, read_table("facts.tsv"))


@pytest.mark.parametrize(("question", "aliases", "answer", "sentence"), read_table("fact_sentences.tsv"))
def test_the_table_of_sentences(question, aliases, answer, sentence):
    asked = Record("t1", "mine", "factual", question, "", metadata={"aliases": aliases.split(" | ")})
    [verdict] = FactualGrader().grade([asked], [answer])
    assert verdict.correct is (sentence == "true")
    if verdict.correct:
        assert FactualGrader("contains").grade([asked], [answer]) == [verdict]


@pytest.mark.parametrize(
    ("answer", "named"), [("Maybe it is not Athens, but Sparta.", True), ("Athenser", False), ("", False)]
)
def test_an_answer_names_the_gold_answer_whatever_surrounds_it(answer, named):
    assert names_answer(Record("t1", "mine", "factual", "Who?", "Athens"), answer) is named


def test_votes_are_counted_by_the_same_rule():
    pairs = [("Łódź", "Lodz\u200b"), ("x²", "x2"), ("\u200b", "\u200e")]
    assert FactualGrader().equivalent(pairs) == [True, False, False]


def test_tags_tell_flags_apart():
    tags = ("".join(chr(0xE0000 + ord(letter)) for letter in f"{name}\x7f") for name in ("gbeng", "gbsct"))
    england, scotland = (f"\U0001f3f4{tag}" for tag in tags)
    verdicts = FactualGrader().grade([record([england])] * 2, [england, scotland])
    assert [verdict.correct for verdict in verdicts] == [True, False]


@given(st.text())
def test_normalising_twice_is_normalising_once(text):
    assert normalise_fact(normalise_fact(text)) == normalise_fact(text)


@pytest.mark.parametrize("aliases", [None, [], "Paris", [1], ["A"], ["The The", "?"]])
def test_records_without_aliases_are_refused(aliases):
    with pytest.raises(DataError, match=r"'t1' of 'triviaqa'.*aliases"):
        FactualGrader().grade([record(aliases)], ["Paris"])


@pytest.mark.parametrize("answer", ["", "\n\n", r"\boxed{Par", "x" * 100_000, "\ud800", "no " * 10_000])
def test_facts_and_spellings_are_right_or_wrong(answer):
    assert FactualGrader().grade([record(["Paris"])], [answer])[0].outcome is Outcome.WRONG
    assert ExactGrader().grade([Record("t1", "mine", "math", "?", "Paris")], [answer])[0].outcome is Outcome.WRONG
