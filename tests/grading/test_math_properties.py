r"""Math grading on generated answers: what differs is never right, what is the same in other clothes always is.

Verdicts are asked for in this process: the pool adds nothing to them but its time limit.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.grading.verdict import Outcome
from tests.grading.tables import read_table
from tests.grading.test_symbols import outcome

integers = st.integers(min_value=-(10**6), max_value=10**6)
small = st.integers(min_value=-30, max_value=30)
units = st.sampled_from([r"\text{ cm}", r"\text{ square units}", " apples", r"\ \text{dollars}", r"\,\mathrm{kg}"])
names = st.sampled_from(["Alice", "Tuesday", "even", "Yes", "north", "isosceles", "Zürich", "Bob Smith", "no solution"])
choices = st.sampled_from("ABCDE")


def fraction(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def matrix(rows: list[list[int]], blank: str = "", kind: str = "pmatrix") -> str:
    text = rf"{blank}\\{blank}".join(f"{blank}&{blank}".join(map(str, row)) for row in rows)
    return rf"\begin{{{kind}}}{blank}{text}{blank}\end{{{kind}}}"


def tuple_text(values: list[int], blank: str = "") -> str:
    return "(" + f",{blank}".join(map(str, values)) + ")"


CLOTHES: list[Callable[[str], str]] = [
    lambda text: f" {text} ",
    lambda text: rf"\,{text}\,",
    lambda text: rf"\!{text}",
    lambda text: f"${text}$",
    lambda text: rf"\({text}\)",
    lambda text: f"{text}.",
    lambda text: rf"\displaystyle {text}",
    lambda text: rf"\boxed{{{text}}}",
    lambda text: f"**{text}**",
]
clothes = st.sampled_from(CLOTHES)
NUMBER_CLOTHES: list[Callable[[str], str]] = [
    lambda text: f"={text}",
    lambda text: rf"\approx {text}",
    lambda text: rf"\text{{about }} {text}",
    lambda text: f"x = {text}",
]


@settings(max_examples=80, deadline=None)
@given(integers, integers, clothes, st.sampled_from(NUMBER_CLOTHES), units)
def test_integers(a: int, b: int, dress: Any, number_dress: Any, unit: str) -> None:
    same = [dress(str(a)), number_dress(str(a)), f"{a}{unit}", f"{a:,}", f"{a}.0"]
    assert [answer for answer in same if outcome(str(a), answer) is not Outcome.RIGHT] == []
    if a != b:
        assert [answer for answer in (dress(str(b)), number_dress(str(b)), f"{b}{unit}", f"{a}, {b}", f"{a}:{b}",
                f"{a} or {b}", rf"\{{{a},{b}\}}") if outcome(str(a), answer) is Outcome.RIGHT] == []  # fmt: skip


CHANGING = """twelfths thirds sevenths quadrillion million dozen doubled tripled halved squared cubed fifths hundredths
hundred times minus plus wrong not tenfold quadruple nineteenths thirtieths octillion point seven grand factorials
subfactorials myriads bps permille thou percentiles gross lakhs inverses reciprocals"""
VALUE_WORDS = st.sampled_from(CHANGING.split())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(min_value=1, max_value=10**4),
    VALUE_WORDS,
    st.sampled_from(["{n} {w}", r"{n}\text{{ {w}}}", "{n} {w} two"]),
)
def test_words_that_change_a_value(n: int, word: str, form: str) -> None:
    assert outcome(str(n), form.format(n=n, w=word)) is not Outcome.RIGHT


UNITS = read_table("units.tsv")


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 999), st.sampled_from(UNITS), st.sampled_from(UNITS), st.randoms(use_true_random=False))
def test_units_in_any_spelling(n: int, unit: tuple[str, ...], other: tuple[str, ...], draw: Any) -> None:
    first, second, third = draw.choice(unit), draw.choice(unit), draw.choice(other)
    assert outcome(f"{n}{first}", f"{n}{second}") is Outcome.RIGHT
    assert outcome(str(n), f"{n}{first}") is outcome(f"{n}{first}", str(n)) is Outcome.RIGHT
    assert (outcome(f"{n}{first}", f"{n}{third}") is Outcome.RIGHT) == (unit is other)
    assert outcome(f"{n}{first}", f"{n + 1}{second}") is Outcome.WRONG


@settings(max_examples=12, deadline=None)
@given(
    small,
    st.integers(1, 30),
    st.sampled_from("[("),
    st.sampled_from("])"),
    st.sampled_from("xyt"),
    st.randoms(use_true_random=False),
)
def test_intervals_in_any_spelling(low: int, width: int, left: str, right: str, x: str, draw: Any) -> None:
    gold, high = f"{left}{low},{low + width}{right}", low + width
    above, below = ("\\le" if left == "[" else "<"), ("\\le" if right == "]" else "<")
    turned = "\\ge" if left == "[" else ">"
    chain = f"{low} {above} {x} {below} {high}"
    spellings = [
        f"{'[' if left == '[' else ']'}{low},{high}{']' if right == ']' else '['}",
        f"{'[' if left == '[' else ']'}{low};{high}{']' if right == ']' else '['}",
        rf"\{{{x}\mid {chain}\}}",
        rf"\{{{x}\in\mathbb{{R}}: {chain}\}}",
        rf"{x} {turned} {low} \text{{ and }} {x} {below} {high}",
    ]
    assert [text for text in spellings if outcome(gold, text) is not Outcome.RIGHT] == []
    assert [text for text in spellings if outcome(text, gold) is not Outcome.RIGHT] == []
    others = [f"({low},{high})", f"[{low},{high})", f"({low},{high}]", f"[{low},{high}]"]
    for other in set(others) - {gold}:
        assert outcome(other, draw.choice(spellings)) is not Outcome.RIGHT


@settings(max_examples=60, deadline=None)
@given(st.fractions(-99, 99, max_denominator=60), st.fractions(-99, 99, max_denominator=60), clothes)
def test_fractions(a: Fraction, b: Fraction, dress: Any) -> None:
    assert outcome(fraction(a), dress(f"{3 * a.numerator}/{3 * a.denominator}")) is Outcome.RIGHT
    assert (outcome(fraction(a), dress(fraction(b))) is Outcome.RIGHT) == (a == b)


@settings(max_examples=40, deadline=None)
@given(st.lists(small, min_size=2, max_size=4), st.lists(small, min_size=2, max_size=4), clothes)
def test_tuples_and_intervals(a: list[int], b: list[int], dress: Any) -> None:
    assert outcome(tuple_text(a), dress(tuple_text(a, r"\, "))) is Outcome.RIGHT
    assert (outcome(tuple_text(a), dress(tuple_text(b))) is Outcome.RIGHT) == (a == b)
    low, high = min(a), max(a) + 1
    for gold, other in ((f"[{low},{high})", f"({low},{high}]"), (f"[{low},{high}]", f"[{low},{high})")):
        assert outcome(gold, dress(gold.replace(",", ", "))) is Outcome.RIGHT
        assert outcome(gold, dress(other)) is not Outcome.RIGHT


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda columns: st.lists(st.lists(small, min_size=columns, max_size=columns), min_size=1, max_size=3)
    ),
    st.sampled_from(["", " ", "  ", r"\,", "\n"]),
    st.sampled_from(["pmatrix", "bmatrix"]),
    st.randoms(use_true_random=False),
)
def test_matrices(rows: list[list[int]], blank: str, kind: str, draw: Any) -> None:
    gold = matrix(rows, draw.choice(["", " "]))
    assert outcome(gold, matrix(rows, blank, kind)) is Outcome.RIGHT
    transposed = [list(column) for column in zip(*rows, strict=True)]
    shuffled = [number for row in rows for number in row]
    draw.shuffle(shuffled)
    mixed = [shuffled[n * len(rows[0]) : (n + 1) * len(rows[0])] for n in range(len(rows))]
    for other in (transposed, mixed):
        found = outcome(gold, matrix(other, blank, kind)) is Outcome.RIGHT
        assert found == (other == rows)


@settings(max_examples=60, deadline=None)
@given(
    names,
    names,
    clothes,
    st.sampled_from(["!{}", "¬{}", "not {}", "{}?", "{} 1", "{}/{}x", "{} or no", "un{}", "{}^c"]),
)
def test_words(a: str, b: str, dress: Any, spoiled: str) -> None:
    assert outcome(a, dress(rf"\text{{{a}}}")) is Outcome.RIGHT
    assert outcome(rf"\text{{{a}}}", dress(a.upper())) is Outcome.RIGHT
    assert (outcome(a, dress(b)) is Outcome.RIGHT) == (a == b)
    assert outcome(a, spoiled.format(a, a)) is not Outcome.RIGHT


@settings(max_examples=60, deadline=None)
@given(choices, choices, st.sampled_from(["12", r"\frac12", "a dog", "x+1"]), clothes)
def test_choices(a: str, b: str, option: str, dress: Any) -> None:
    for form in ("{}", "({})", r"\text{{({})}}", r"\textbf{{({}) }}" + option, "{}. " + option):
        assert (outcome(a, dress(form.format(b))) is Outcome.RIGHT) == (a == b)
    if a != b:
        for form in ("({}) {}", "{}, {}", "{} or {}", "({})({})", "{}. {}.", "({}) " + option + ", {}"):
            assert outcome(a, form.format(a, b)) is not Outcome.RIGHT
    assert outcome(a, f"{a}_1") is not Outcome.RIGHT
    assert outcome(a, f"{a.lower()}_{{16}}") is not Outcome.RIGHT


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(2, 13), st.integers(2, 20), units)
def test_radicals_and_polynomials(a: int, b: int, c: int, unit: str) -> None:
    if not unit.endswith("apples"):  # a word behind an expression may be a product of letters
        assert outcome(rf"{a}\sqrt{{{b}}}", rf"{a}\sqrt{{{b}}}{unit}") is Outcome.RIGHT
    assert (outcome(rf"{a}\sqrt{{{b}}}", rf"{c}\sqrt{{{b}}}") is Outcome.RIGHT) == (a == c)
    assert outcome(f"{a}x+{b}", rf"{b} \,+\, {a} x") is Outcome.RIGHT
    assert (outcome(f"x^2+{a}x+{b}", f"x^2+{c}x+{b}") is Outcome.RIGHT) == (a == c)
