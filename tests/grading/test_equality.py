r"""Two expressions are equal if they are, not if their first digits are."""

import json
import resource
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader
from tests.processor import allowed
from tests.shared_data import shared_data

equality = pytest.importorskip("coca_mindspeed.grading.math.equality")
latex = pytest.importorskip("coca_mindspeed.grading.math.latex")


def equal(a: str, b: str) -> bool | None:
    answer: bool | None = equality.equal(latex.parse_latex(a), latex.parse_latex(b))
    return answer


SAME = [
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
    (r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}", "0"),
    (r"\sqrt[3]{2+\sqrt5}-\sqrt[3]{\sqrt5-2}", "1"),
    (r"\frac{1}{\sqrt2+\sqrt3+\sqrt5}", r"\frac{2\sqrt3+3\sqrt2-\sqrt{30}}{12}"),
    (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt5}{4}"),
    (r"\cos\frac{2\pi}{7}+\cos\frac{4\pi}{7}+\cos\frac{6\pi}{7}", r"-\frac12"),
    (r"\sqrt[4]{-4}", "1+i"),
    ("i^i", r"e^{-\pi/2}"),
    (r"e^{i\pi/3}", r"\frac{1+i\sqrt3}{2}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("(x+1)^{1000}", "(x^2+2x+1)^{500}"),
    ("(x+1)^{1000000}", "(x^2+2x+1)^{500000}"),
    ("3^{1000000}x", "9^{500000}x"),
    ("|x|", r"\sqrt{x^2}"),
    (r"\max(a,b)", r"\frac{a+b+|a-b|}{2}"),
    (r"\sum_{k=0}^{n}x^k", r"\frac{x^{n+1}-1}{x-1}"),
    (r"\sum_{k=1}^{\infty}2^{-k}", "1"),
    (r"\sum_{k=1}^{n}k", r"\frac{n(n+1)}{2}"),
    ("4^n", r"2^{2n}"),
    ("x^{n+1}", r"x\cdot x^n"),
    (r"\sin(x+y)", r"\sin x\cos y+\cos x\sin y"),
    (r"\tan^2 x+1", r"\frac{1}{\cos^2 x}"),
    (r"\sinh x", r"\frac{e^x-e^{-x}}{2}"),
    (r"\sin 1^\circ", r"\cos 89^\circ"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\ln\sqrt{8}", r"\frac32\ln 2"),
    (r"e^{\ln 5+x}", "5e^x"),
    (r"e\cdot e^{3/2+x}", "e^{5/2}e^x"),
    (r"\cos^2\frac{x}{2}", r"\frac{1+\cos x}{2}"),
    (r"\sin\frac37\cos\frac37", r"\frac12\sin\frac67"),
    (r"\arctan 2+\arctan\frac12", r"\frac{\pi}{2}"),
    (r"n!", r"n\cdot(n-1)!"),
    (r"f(x+x)+1", "1+f(2x)"),
]
DIFFERENT = [
    (r"\sqrt2(1-2^{-100})", r"\sqrt2"),
    (r"\sqrt2(1-2^{-5000})", r"\sqrt2"),
    ("x+10^{-30}", "x"),
    ("x+10^{-5000}", "x"),
    ("x^{1000000}", "x^{1000000}+1"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"\sqrt{10^{80}+1}", "10^{40}"),
    (r"\sqrt{x^2+10^{-60}}", "|x|"),
    (r"\pi(1-10^{-400})", r"\pi"),
    (r"\pi+e", r"\pi+e+10^{-400}"),
    ("1+e^{-100000}", "1"),
    (r"\tanh 1000", "1"),
    (r"\cos(10^{-40})", "1"),
    (r"\sin x", r"\sin x+10^{-400}"),
    (r"\ln 2", r"\ln(2+10^{-300})"),
    ("2^x", "2^x+10^{-400}"),
    (r"\sum_{k=1}^{300}2^{-k}", "1"),
    (r"\sum_{k=0}^{n}2^{-k}", "2"),
    ("(1+10^{-30})^{10^{30}}", "e"),
    (r"\arctan 2", r"\arctan 2+10^{-200}"),
    ("n!", "n!+10^{-200}"),
    (r"x+\prod_{k=1}^{40}(x-k)", "x"),
    ("f(x)", "f(x)+10^{-300}"),
    ("f(x)", "f(2x)"),
    (r"\sqrt{x^2}", "x"),
    (r"\ln(x^2)", r"2\ln x"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_equal_expressions(a: str, b: str) -> None:
    assert equal(a, b) is True
    assert equal(b, a) is True


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_expressions_that_differ_far_behind_the_point(a: str, b: str) -> None:
    assert equal(a, b) is False
    assert equal(b, a) is False


@pytest.mark.parametrize(("a", "b"), [("3^{10^{12}}", "7"), ("x^{10^{12}}", "x"), ("(x+1)^{10^{9}}", "(x-1)^{10^{9}}")])
def test_large_powers_cost_neither_time_nor_memory(a: str, b: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert equal(a, b) is False
    assert time.process_time() - started < allowed(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=3, unique=True), st.integers(-30, 30), st.integers(30, 400))
def test_squares_of_sums_of_roots(radicands: Sequence[int], whole: int, digits: int) -> None:
    roots = [rf"\sqrt{{{radicand}}}" for radicand in radicands]
    square = rf"({'+'.join(roots)}{whole:+d})^2"
    terms = [str(whole**2 + sum(radicands)), *(f"{2 * whole}{root}" for root in roots)]
    terms += [rf"2\sqrt{{{a * b}}}" for n, a in enumerate(radicands) for b in radicands[:n]]
    expanded = "+".join(f"({term})" for term in terms)
    assert equal(square, expanded) is True
    assert equal(square, rf"{expanded}+10^{{-{digits}}}") is False


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=5), st.integers(30, 400), st.sampled_from(["x", "e^x", r"\sin x", r"\pi", r"\ln 2"]))  # fmt: skip  # noqa: E501
def test_polynomials_in_anything(roots: Sequence[int], digits: int, of: str) -> None:
    product = "".join(rf"({of}{-root:+d})" for root in roots)
    coefficients = [1]
    for root in roots:
        coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
    degree = len(roots)
    expanded = "+".join(rf"({c})({of})^{{{degree - n}}}" for n, c in enumerate(coefficients))
    assert equal(product, expanded) is True
    assert equal(product, rf"{expanded}+10^{{-{digits}}}") is False


def test_gold_answers_of_math_500_are_right_against_themselves_and_not_the_next() -> None:
    with shared_data("math500_test.jsonl").open(encoding="utf-8") as file:
        golds = list(dict.fromkeys(json.loads(line)["answer"] for line in file))
    records = [Record(id=gold, dataset="test", category="math", question="?", answer=gold) for gold in golds]
    grader = MathGrader(seconds=60.0, workers=2)
    try:
        assert [gold for gold, problem in zip(golds, grader.gold_problems(golds), strict=True) if problem] == []
        itself = grader.grade(records, [rf"\boxed{{{gold}}}" for gold in golds])
        bracketed = grader.grade(records, [rf"\boxed{{{{{gold}}} }}" for gold in golds])
        following = grader.grade(records, [rf"\boxed{{{gold}}}" for gold in [*golds[1:], golds[0]]])
    finally:
        grader.close()
    assert [gold for gold, verdict in zip(golds, itself, strict=True) if not verdict.correct] == []
    assert sum(verdict.correct for verdict in bracketed) > 0.7 * len(golds)
    assert [gold for gold, verdict in zip(golds, following, strict=True) if verdict.correct] == []
