r"""Math grading on generated answers: what differs is never right, what is the same in other clothes always is.

Verdicts are asked for in this process: the pool adds nothing to them but its time limit.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.grading.verdict import Outcome
from tests.grading.tables import read_table
from tests.grading.test_symbols import outcome

integers = st.integers(min_value=-(10**6), max_value=10**6)
units = st.sampled_from([r"\text{ cm}", r"\text{ square units}", " apples", r"\ \text{dollars}", r"\,\mathrm{kg}"])
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


UNITS = read_table("units.tsv")


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 999), st.sampled_from(UNITS), st.sampled_from(UNITS), st.randoms(use_true_random=False))
def test_units_in_any_spelling(n: int, unit: tuple[str, ...], other: tuple[str, ...], draw: Any) -> None:
    first, second, third = draw.choice(unit), draw.choice(unit), draw.choice(other)
    assert outcome(f"{n}{first}", f"{n}{second}") is Outcome.RIGHT
    assert outcome(str(n), f"{n}{first}") is outcome(f"{n}{first}", str(n)) is Outcome.RIGHT
    assert (outcome(f"{n}{first}", f"{n}{third}") is Outcome.RIGHT) == (unit is other)
    assert outcome(f"{n}{first}", f"{n + 1}{second}") is Outcome.WRONG
