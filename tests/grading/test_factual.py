"""Facts with aliases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.facts.factual import FactualGrader, MatchRule, normalise, stated_fact

ALIASES = ["Sir Arthur Conan Doyle", "Arthur Conan Doyle", "A. Conan Doyle"]


def record(aliases: object) -> Record:
    return Record("t1", "triviaqa", "factual", "Who?", "", metadata={"aliases": aliases})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles", "beatles"),
        ("An_apple a day", "apple day"),
        ("J.R.R. Tolkien", "j r r tolkien"),
        ("“Hamlet”", "hamlet"),
        ("Theatre", "theatre"),
        ("the", ""),
        ("C#", "c#"),
        ("C♯ minor", "c# minor"),
        ("C++.", "c++"),
        ("`C`", "c"),
        ("Notepad++", "notepad++"),
        ("AB−", "ab-"),
        ("A+", "a+"),
        ("A-team", "team"),
        ("Disney+", "disney"),
        ("R+B", "r b"),
        ("1,234,567", "1234567"),
        ("1,23", "1 23"),
        ("-5", "minus 5"),
        ("- 5", "minus 5"),
        ("−$5", "minus 5"),
        ("1914-1918", "1914 1918"),
        ("3.50", "3.50"),
        ("12.5.1999", "12 5 1999"),
        (".5", "0.5"),
        ("< 5", "less than 5"),
        ("<b>5</b>", "b 5 b"),
        ("!even", "not even"),
        ("even!", "even"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", "Paris"),
        ("\n\nParis\nbecause", "Paris"),
        ("I think hard.\nThe answer is Paris.", "Paris."),
        ("Answer: Paris\nmore", "Paris"),
        (r"so \boxed{\text{Paris}}", "Paris"),
        (r"\boxed{Paris} or rather \boxed{London", ""),
        ("<think>London?</think> <answer>Paris</answer>", "Paris"),
        (r"<answer>London</answer> \boxed{Paris}", "Paris"),
        ("**Answer**\nParis", "Paris"),
        ("...", ""),
        ("", ""),
    ],
)
def test_stated_fact(answer: str, expected: str) -> None:
    assert stated_fact(answer) == expected


@pytest.mark.parametrize(
    ("answer", "exact", "contains"),
    [
        ("Arthur Conan Doyle", True, True),
        ("arthur conan doyle.", True, True),
        ("The answer is A. Conan Doyle.", True, True),
        ("Arthur Conan Doyle. He wrote many books.", False, True),  # exact: nothing else on the line
        ("Arthur Conan Doyle\nbecause he invented Holmes", True, True),
        ("Arthur Conan Doyle. Agatha Christie", False, False),
        ("Arthur Conan Doyle? Or maybe Agatha Christie?", False, False),
        ("Arthur Conan Doyle\nAgatha Christie", False, False),
        ("Arthur Conan Doyle\nOr it could have been Agatha Christie", False, False),
        ("Arthur Conan Doyle\nActually it was Agatha Christie", False, False),
        ("The answer is Arthur Conan Doyle.\nAgatha Christie", False, False),
        ("Not Arthur Conan Doyle", False, False),
        ("It wasn't Arthur Conan Doyle", False, False),
        ("anyone other than Arthur Conan Doyle", False, False),
        ("It is false that it was Arthur Conan Doyle", False, False),
        ("Arthur Conan Doyle or Agatha Christie", False, False),
        ("Arthur Conan Doyle and Agatha Christie", False, False),
        ("Arthur Conan Doyle, Agatha Christie, Dorothy Sayers", False, False),
        ("Arthur Conan Doyle/Agatha Christie", False, False),
        ("Arthur Conan Doyle (Agatha Christie)", False, False),
        ("Arthur Conan Doyle Agatha Christie", False, False),
        (r"\boxed{Arthur Conan Doyle", False, False),
        ("Yes, it was Arthur Conan Doyle", False, True),
        ("the famous Arthur Conan Doyle", False, True),
        ("It was Arthur Conan Doyle", False, True),
        ("<answer>Arthur Conan Doyle</answer>", True, True),
        ("<answer>Arthur Conan Doyle or Agatha Christie</answer>", False, False),
        ("The wrong answer is Arthur Conan Doyle", False, False),
        ("Arthur Conan Doyleson", False, False),
        ("Conan", False, False),
        ("the", False, False),
        ("", False, False),
        ("x " * 40 + "Arthur Conan Doyle", False, False),
    ],
)
def test_grading(answer: str, exact: bool, contains: bool) -> None:
    for match, expected in (("exact", exact), ("contains", contains)):
        verdict = FactualGrader(match).grade([record(ALIASES)], [answer])[0]  # type: ignore[arg-type]
        assert verdict.correct is expected, (match, answer)


def test_aliases_may_hold_what_hedges_and_lists_are_made_of() -> None:
    for alias in ("Romeo and Juliet", "Paris, France", "Or", "Not Fade Away", "To Be or Not to Be"):
        for match in ("exact", "contains"):
            assert FactualGrader(match).grade([record([alias])], [alias])[0].correct, alias  # type: ignore[arg-type]
        assert FactualGrader("contains").grade([record([alias])], [f"It is {alias}."])[0].correct, alias


@pytest.mark.parametrize(
    ("answer", "exact", "contains"),
    [
        ("1234", True, True),
        ("1,234.", True, True),
        ("$1,234", True, True),
        ("1234!", True, True),
        ("there are 1,234 of them", False, True),
        ("-1234", False, False),
        ("- 1234", False, False),
        ("−1,234", False, False),
        ("1.234", False, False),
        ("1234.5", False, False),
        (".1234", False, False),
        ("11,234", False, False),
        (">1234", False, False),
        ("<= 1234", False, False),
        ("≥1234", False, False),
        ("!1234", False, False),
        ("≠1234", False, False),
        ("more than 1234", False, False),
        ("hardly 1234", False, False),
    ],
)
def test_a_number_is_its_value_and_not_its_digits(answer: str, exact: bool, contains: bool) -> None:
    for match, expected in (("exact", exact), ("contains", contains)):
        [verdict] = FactualGrader(match).grade([record(["1,234"])], [answer])
        assert verdict.correct == expected, (match, answer)


def test_a_negative_number_may_be_the_answer() -> None:
    grader = FactualGrader("contains")
    assert [v.correct for v in grader.grade([record(["-12"])] * 3, ["-12", "minus 12", "12"])] == [True, True, False]


def test_composed_and_decomposed_characters_are_the_same() -> None:
    for gold, answer in (("Z\u00fcrich", "Zu\u0308rich"), ("Zu\u0308rich", "Z\u00fcrich")):
        assert FactualGrader().grade([record([gold])], [answer])[0].correct
    assert not FactualGrader().grade([record(["Z\u00fcrich"])], ["Zurich"])[0].correct


def test_an_alias_of_nothing_but_articles_matches_nothing() -> None:
    for match in ("exact", "contains"):
        grader = FactualGrader(match)  # type: ignore[arg-type]
        assert not grader.grade([record(["The The", "x y"])], ["The. Something else"])[0].correct


@pytest.mark.parametrize("match", ["exact", "contains"])
@pytest.mark.parametrize(
    ("alias", "answer", "expected"),
    [
        ("C", "C", True),
        ("C", "C++", False),
        ("C", "C#", False),
        ("C++", "C", False),
        ("C++", "C#", False),
        ("C++", "c++.", True),
        ("C#", "C♯", True),
        ("C# minor", "C minor", False),
        ("A", "A-", False),
        ("AB", "AB+", False),
        ("AB-", "AB+", False),
        ("AB-", "AB−", True),
        ("O+", "Answer: O+", True),
    ],
)
def test_a_sign_at_the_end_of_a_short_name_is_part_of_it(
    alias: str, answer: str, expected: bool, match: MatchRule
) -> None:
    [verdict] = FactualGrader(match=match).grade([record([alias, "nothing else"])], [answer])
    assert verdict.correct is expected


def test_a_name_with_a_sign_is_no_list_of_names() -> None:
    grader = FactualGrader(match="contains")
    answers = ["The C++ language", "C++ + Java", "Java+C++"]
    assert [verdict.correct for verdict in grader.grade([record(["C++"])] * 3, answers)] == [True, False, False]


@pytest.mark.parametrize("aliases", [None, [], "Paris", [1], ["A"], ["The The", "?"]])
def test_records_without_aliases_are_refused(aliases: object) -> None:
    with pytest.raises(DataError, match=r"'t1' of 'triviaqa'.*aliases"):
        FactualGrader().grade([record(aliases)], ["Paris"])


@pytest.mark.parametrize("answer", ["**Answer**: Paris", "**Answer:** Paris", "_Answer_ is Paris"])
@pytest.mark.parametrize("match", ["exact", "contains"])
def test_marks_around_the_word_answer_are_not_the_answer(answer: str, match: str) -> None:
    [verdict] = FactualGrader(match=match).grade([record(["Paris"])], [answer])
    assert verdict.correct


def test_unknown_rule() -> None:
    with pytest.raises(GradingError, match="'exact' or 'contains'"):
        FactualGrader("fuzzy")  # type: ignore[arg-type]


def test_equivalence() -> None:
    grader = FactualGrader()
    assert grader.final_answers(["The answer is Paris.", "..."]) == ["Paris.", None]
    assert grader.equivalent([("Paris.", "paris"), ("Paris", "Rome"), ("the", "a")]) == [True, False, False]
