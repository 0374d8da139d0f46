r"""Two expressions are equal if they are, not if their first digits are."""

import resource
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.grading.math.normalise import one_spelling
from tests.grading.tables import read_table
from tests.processor import allowed

algebra = pytest.importorskip("coca_mindspeed.grading.math.equal")
parser = pytest.importorskip("coca_mindspeed.grading.math.parse")


def equal(a: str, b: str) -> bool | None:
    """Whether two expressions are equal; None if one of them is not read."""
    try:
        return bool(algebra.same_scalar(*(parser.parse(one_spelling(side)) for side in (a, b))))
    except parser.NotMathematicsError:
        return None


@pytest.mark.parametrize(("a", "b", "expected"), read_table("expressions.tsv"))
def test_the_table_of_expressions(a: str, b: str, expected: str) -> None:
    assert (equal(a, b) is True) is (equal(b, a) is True) is (expected == "true")


@pytest.mark.timing
@pytest.mark.parametrize(("a", "b"), [("x^{10^{12}}", "x"), ("(x+1)^{10^{9}}", "(x-1)^{10^{9}}")])
def test_large_powers_cost_neither_time_nor_memory(a: str, b: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert equal(a, b) is False
    assert time.process_time() - started < allowed(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=3, unique=True), st.integers(-30, 30), st.integers(30, 400))
def test_squares_of_sums_of_roots(radicands: Sequence[int], whole: int, digits: int) -> None:
    roots = [rf"\sqrt{{{radicand}}}" for radicand in radicands]
    square = rf"({'+'.join(roots)}{whole:+d})^2"
    terms = [str(whole**2 + sum(radicands)), *(f"{2 * whole}{root}" for root in roots)]
    terms += [rf"2\sqrt{{{a * b}}}" for n, a in enumerate(radicands) for b in radicands[:n]]
    expanded = "+".join(f"({term})" for term in terms)
    assert equal(square, expanded) is True
    assert equal(square, rf"{expanded}+10^{{-{digits}}}") is False
