r"""Algebra in this process: symbols are the same only if their letter, alphabet, case, index, prime and accent are;
expressions are equal if they are, not if their first digits are; what differs is never right, in whatever clothes.
"""

import itertools
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.grading.math.extract import final_answer
from coca_mindspeed.grading.math.normalise import one_spelling, read_answer
from coca_mindspeed.grading.math.plain import verdict_without_algebra
from coca_mindspeed.grading.verdict import Outcome
from tests.grading.tables import read_table
from tests.processor import within
from tests.tables import EVERY

equal = pytest.importorskip("coca_mindspeed.grading.math.equal")

LETTERS = ["a", "A", "b", "B", "e", "E", "i", "I", "k", "K", "l", "n", "N", "p", "r", "R", "u", "v", "w", "x", "X", "T"]
GREEK = r"""\alpha \beta \gamma \Gamma \delta \Delta \epsilon \varepsilon \theta \vartheta \Theta \kappa \lambda \Lambda
\mu \nu \xi \Xi \pi \Pi \varpi \rho \sigma \Sigma \tau \phi \varphi \Phi \chi \psi \Psi \omega \Omega \ell \hbar"""
DRESSED = r"""x_1 x_2 X_1 x_n x_N x_{12} x_{n+1} \alpha_1 \alpha_2 \gamma_1 \Gamma_1 \theta_n x' x'' X' x_1' x_2'
\alpha' \bar{x} \hat{x} \vec{x} \vec{X} \tilde{x} \dot{x} \ddot{x} \bar{X} \hat{\theta} \mathcal{X}
\mathfrak{X} \bar{x}_1 \hat{x}' \overline{AB} \overline{Ab} \overline{A'B}"""
SYMBOLS = [*LETTERS, *GREEK.split(), *DRESSED.split()]
EXPRESSIONS = read_table("symbol_expressions.tsv")  # S is the symbol; the right side is another way to write the left

pairs_of_symbols = st.tuples(st.sampled_from(SYMBOLS), st.sampled_from(SYMBOLS)).filter(lambda pair: pair[0] != pair[1])


def outcome(gold, answer):
    final = final_answer(rf"\boxed{{{answer}}}")
    assert final is not None
    wanted, given_ = read_answer(gold), read_answer(final)
    verdict = verdict_without_algebra(wanted, given_)
    return equal.compare((wanted.body, given_.body))[0] if verdict is None else verdict.outcome


def put(template, symbol):
    return template.replace("S", f"{{{symbol}}}")


@settings(max_examples=100, deadline=None)
@given(pairs_of_symbols, st.sampled_from(EXPRESSIONS), st.booleans())
def test_an_answer_with_another_symbol_is_not_right(symbols, expression, again):
    gold, answer = expression[0], expression[again]
    assert outcome(put(gold, symbols[0]), put(answer, symbols[1])) is not Outcome.RIGHT


@pytest.mark.parametrize("every", EVERY)
def test_all_pairs_of_symbols_alone_differ(every):
    pairs = list(itertools.combinations(SYMBOLS, 2))[::every]
    assert [pair for pair in pairs if outcome(*pair) is Outcome.RIGHT] == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([symbol for symbol in SYMBOLS if symbol not in ("i", "T")]), st.sampled_from(EXPRESSIONS))
def test_the_same_symbol_is_the_same(symbol, expression):
    gold, answer = (put(side, symbol) for side in expression)
    assert outcome(gold, answer) is Outcome.RIGHT


@pytest.mark.parametrize("gold", ["|{}{}|", r"\sqrt{{{}^2{}^2}}", r"\frac{{|{}|}}{{|{}|}}"])
@pytest.mark.parametrize("every", EVERY)
def test_an_absolute_value_of_any_letters_has_no_sign(gold, every):
    product = r"\frac{{{}}}{{{}}}" if "frac" in gold else "{}{}"
    pairs = list(itertools.combinations("adknoptuxyz", 2))[::every]
    assert [pair for pair in pairs if outcome(gold.format(*pair), product.format(*pair)) is Outcome.RIGHT] == []


@pytest.mark.parametrize("gold", ["x=x", "0=0", "2+3=5", "x+1=1+x", "x<x+1", "1<2", "x=x+1", r"\{x=x, y=2\}"])
def test_a_gold_answer_that_says_nothing_accepts_no_other(gold):
    assert equal.compare((gold, "y=y"))[0] is not Outcome.RIGHT
    assert equal.compare((gold, "z<z+1"))[0] is not Outcome.RIGHT


@pytest.mark.parametrize(
    "gold", ["N=n", "x=5", "x=2y", r"f(x)=x", "x<5", r"x=\frac{1}{2}=0.5", "x=1,y=2", "0", "1", "x", "[0,1]", "x^2=1"]
)
def test_a_gold_answer_that_says_something_is_used(gold):
    assert equal.compare((gold, gold))[0] is Outcome.RIGHT


parse = pytest.importorskip("coca_mindspeed.grading.math.parse")


def equal_scalars(a, b):
    """Whether two expressions are equal; None if one of them is not read."""
    try:
        return bool(equal.same_scalar(*(parse.parse(one_spelling(side)) for side in (a, b))))
    except parse.NotMathematicsError:
        return None


@pytest.mark.parametrize(("a", "b", "expected"), read_table("expressions.tsv"))
def test_the_table_of_expressions(a, b, expected):
    assert (equal_scalars(a, b) is True) is (equal_scalars(b, a) is True) is (expected == "true")


@pytest.mark.timing
@pytest.mark.parametrize(("a", "b"), [("x^{10^{12}}", "x"), ("(x+1)^{10^{9}}", "(x-1)^{10^{9}}")])
def test_large_powers_cost_neither_time_nor_memory(a, b):
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert equal_scalars(a, b) is False
    assert within(time.process_time() - started, 1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=3, unique=True), st.integers(-30, 30), st.integers(30, 400))
def test_squares_of_sums_of_roots(radicands, whole, digits):
    roots = [rf"\sqrt{{{radicand}}}" for radicand in radicands]
    square = rf"({'+'.join(roots)}{whole:+d})^2"
    terms = [str(whole**2 + sum(radicands)), *(f"{2 * whole}{root}" for root in roots)]
    terms += [rf"2\sqrt{{{a * b}}}" for n, a in enumerate(radicands) for b in radicands[:n]]
    expanded = "+".join(f"({term})" for term in terms)
    assert equal_scalars(square, expanded) is True
    assert equal_scalars(square, rf"{expanded}+10^{{-{digits}}}") is False


UNITS = read_table("units.tsv")


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 999), st.sampled_from(UNITS), st.sampled_from(UNITS), st.randoms(use_true_random=False))
def test_units_in_any_spelling(n, unit, other, draw):
    first, second, third = draw.choice(unit), draw.choice(unit), draw.choice(other)
    assert outcome(f"{n}{first}", f"{n}{second}") is Outcome.RIGHT
    assert outcome(str(n), f"{n}{first}") is outcome(f"{n}{first}", str(n)) is Outcome.RIGHT
    assert (outcome(f"{n}{first}", f"{n}{third}") is Outcome.RIGHT) == (unit is other)
    assert outcome(f"{n}{first}", f"{n + 1}{second}") is Outcome.WRONG


# Digits of other alphabets, raised and lowered ones, numbers that are no digits, and LaTeX in any order.
SIGNS = r"""² ³ ⁰ ⁻ ₂ ₙ ⁿ ½ ① Ⅳ ٣ ३ ፩ ༳ ↉ 五 𝟛 𝑥 ª √ µ x y e f g ( ) [ ] { } \{ \} | , ; : . + - * / ^ _ ' = < \ge
\approx \in \pm \cup \setminus \frac \sqrt \binom \over \choose \log \sin \circ \pi \infty \emptyset \text{or}
\text{cm} \mod \begin{pmatrix} \end{pmatrix} & \\ \overline \angle \langle \rangle ~ \, \% $ million (five) 1 2 5 .25
12 1,000"""


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(SIGNS.split()), max_size=9),
    st.sampled_from(["", " "]),
    st.sampled_from(["5", "x<2", "(1,2)"]),
)
def test_no_order_of_signs_raises(pieces, blank, other):
    text = blank.join(pieces)
    if final_answer(rf"\boxed{{{text}}}"):
        assert outcome(other, text) is not Outcome.UNGRADABLE


DEEP = ["-" * 1_500 + "5", "x²+2x+1", "፩+x", r"[1,\infty-\infty)", r"\{\infty-\infty,1\}"]


@pytest.mark.parametrize("text", DEEP, ids=lambda text: text[:12])
def test_odd_answers_are_compared_and_wrong(text):
    assert outcome("x<2", text) is Outcome.WRONG
