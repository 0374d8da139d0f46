r"""Two symbols are the same only if their letter, alphabet, case, index, prime and accent are."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.grading.math.extract import final_answer
from coca_mindspeed.grading.math.normalise import read_answer
from coca_mindspeed.grading.math.plain import plain_verdict
from coca_mindspeed.grading.verdict import Outcome

equal = pytest.importorskip("coca_mindspeed.grading.math.equal")

LETTERS = ["a", "A", "b", "B", "e", "E", "i", "I", "k", "K", "l", "n", "N", "p", "r", "R", "u", "v", "w", "x", "X", "T"]
GREEK = r"""\alpha \beta \gamma \Gamma \delta \Delta \epsilon \varepsilon \theta \vartheta \Theta \kappa \lambda \Lambda
\mu \nu \xi \Xi \pi \Pi \varpi \rho \sigma \Sigma \tau \phi \varphi \Phi \chi \psi \Psi \omega \Omega \ell \hbar"""
DRESSED = r"""x_1 x_2 X_1 x_n x_N x_{12} x_{n+1} \alpha_1 \alpha_2 \gamma_1 \Gamma_1 \theta_n x' x'' X' x_1' x_2'
\alpha' \bar{x} \hat{x} \vec{x} \vec{X} \tilde{x} \dot{x} \ddot{x} \bar{X} \hat{\theta} \mathcal{X}
\mathfrak{X} \bar{x}_1 \hat{x}' \overline{AB} \overline{Ab} \overline{A'B}"""
SYMBOLS = [*LETTERS, *GREEK.split(), *DRESSED.split()]
# S is the symbol.  The answer on the right is another way to write what is on the left.
EXPRESSIONS = [
    ("S+q", "q+S"),
    ("3 S^2", "S^2 3"),
    (r"\frac{S}{5}", "0.2 S"),
    (r"\sqrt{S^2+7}", r"\sqrt{7+S^2}"),
    (r"\sin S", r"\sin(S)"),
    (r"\log_{S} 7", r"\log_{S} (7)"),
    ("2^{S}", r"2 \cdot 2^{S-1}"),
    ("|S+q|", "|q+S|"),
    ("f(S)", "f(S) 1"),
    ("(S, 2)", r"\left(S, 2\right)"),
    (r"\{S, 2\}", "2, S"),
    ("[0, S)", r"\left[0, S\right)"),
    (r"(-\infty, 0) \cup (2, S)", r"(2, S) \cup (-\infty, 0)"),
    (r"\begin{pmatrix} S \\ 2 \end{pmatrix}", r"\begin{bmatrix} S \\ 2 \end{bmatrix}"),
    ("q = S + 1", "q = 1 + S"),
    ("q + S = 2", "S + q = 2"),
    ("q < S", "S > q"),
    ("0 < q < S", "S > q > 0"),
    (r"q \ne S", r"S \ne q"),
    (r"\binom{5}{2} S", "10 S"),
]

pairs_of_symbols = st.tuples(st.sampled_from(SYMBOLS), st.sampled_from(SYMBOLS)).filter(lambda pair: pair[0] != pair[1])


def outcome(gold: str, answer: str) -> Outcome:
    final = final_answer(rf"\boxed{{{answer}}}")
    assert final is not None
    wanted, given_ = read_answer(gold), read_answer(final)
    verdict = plain_verdict(wanted, given_)
    return equal.compare((wanted.body, given_.body))[0] if verdict is None else verdict.outcome


def put(template: str, symbol: str, other: str = "") -> str:
    return template.replace("S", f"{{{symbol}}}").replace("Z", f"{{{other}}}")


@settings(max_examples=100, deadline=None)
@given(pairs_of_symbols, st.sampled_from(EXPRESSIONS), st.booleans())
def test_an_answer_with_another_symbol_is_not_right(
    symbols: tuple[str, str], expression: tuple[str, str], again: bool
) -> None:
    gold, answer = expression[0], expression[again]
    assert outcome(put(gold, symbols[0]), put(answer, symbols[1])) is not Outcome.RIGHT


def test_all_pairs_of_symbols_alone_differ() -> None:
    different = [
        pair for pair in itertools.combinations(SYMBOLS, 2) if outcome(pair[0], pair[1]) is Outcome.RIGHT
    ]  # fmt: skip
    assert different == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([symbol for symbol in SYMBOLS if symbol not in ("i", "T")]), st.sampled_from(EXPRESSIONS))
def test_the_same_symbol_is_the_same(symbol: str, expression: tuple[str, str]) -> None:
    gold, answer = (put(side, symbol) for side in expression)
    assert outcome(gold, answer) is Outcome.RIGHT


@pytest.mark.parametrize("gold", ["x=x", "0=0", "2+3=5", "x+1=1+x", "x<x+1", "1<2", "x=x+1", r"\{x=x, y=2\}"])
def test_a_gold_answer_that_says_nothing_accepts_no_other(gold: str) -> None:
    assert equal.compare((gold, "y=y"))[0] is not Outcome.RIGHT
    assert equal.compare((gold, "z<z+1"))[0] is not Outcome.RIGHT


@pytest.mark.parametrize(
    "gold", ["N=n", "x=5", "x=2y", r"f(x)=x", "x<5", r"x=\frac{1}{2}=0.5", "x=1,y=2", "0", "1", "x", "[0,1]", "x^2=1"]
)
def test_a_gold_answer_that_says_something_is_used(gold: str) -> None:
    assert equal.compare((gold, gold))[0] is Outcome.RIGHT
