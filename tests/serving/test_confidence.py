"""The expected value of the digits, the mean of several, and texts that end an answer."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.serving.confidence import expected_confidence, mean_confidence
from coca_mindspeed.serving.pieces import TokenLogProbs
from coca_mindspeed.serving.stop_texts import StopTexts


def token(text, **others):
    probabilities = {text: 1 - sum(others.values()), **others}
    top = tuple((other.encode(), math.log(p)) for other, p in probabilities.items())
    return TokenLogProbs(text.encode(), math.log(probabilities[text]), top)


def said(*tokens):
    return [token("<confidence>"), *tokens, token("</confidence>")]


def test_each_digit_behind_the_point_counts_by_its_chances():
    digits = said(token("0"), token("."), token("8", **{"7": 0.25, "9": 0.25}), token("5", **{"0": 0.5}))
    assert expected_confidence(digits) == pytest.approx(0.8 + 0.025)
    # Several digits in one token; alternatives of another width, or that are no digits, have no weight.
    one = said(token("0."), token("85", **{"95": 0.5, "9": 0.1, "%": 0.1}))
    assert expected_confidence(one) == pytest.approx((0.3 * 0.85 + 0.5 * 0.95) / 0.8)


def test_the_digit_before_the_point_stays_and_nothing_leaves_the_interval():
    assert expected_confidence(said(token("1", **{"0": 0.4}), token("."), token("0", **{"5": 0.4}))) == 1.0
    assert expected_confidence(said(token("1", **{"0": 0.4}))) == 1.0
    assert expected_confidence(said(token("85"), token("%"))) is None
    assert expected_confidence([]) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.dictionaries(st.integers(0, 9), st.floats(0.01, 0.09), max_size=5))))
def test_it_is_the_place_values_expectation(places):
    tokens, expected = [token("."), ], 0.0  # fmt: skip
    for position, (digit, others) in enumerate(places, start=1):
        others = {other: p for other, p in others.items() if other != digit}
        tokens.append(token(str(digit), **{str(other): p for other, p in others.items()}))
        mean = (1 - sum(others.values())) * digit + sum(other * p for other, p in others.items())
        expected += mean * 10.0**-position
    found = expected_confidence(said(*tokens))
    assert found is None if not places else found == pytest.approx(expected)


def test_the_mean_needs_half_of_them():
    assert mean_confidence([0.2, 0.6, None, None]) == pytest.approx(0.4)
    assert mean_confidence([0.2, None, None]) is None
    assert mean_confidence([]) is None


@settings(deadline=None)
@given(
    st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.integers(1, 4),
    st.booleans(),
)  # fmt: skip
def test_any_cut_stops_where_the_first_stop_text_is_whole(text, stops, size, include):
    flow = StopTexts(stops, include=include)
    given_ = "".join([*(flow.feed(text[i : i + size]) for i in range(0, len(text), size)), flow.finish()])
    ends = [(end, -len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        assert given_ == text
        assert not flow.stopped
        return
    end, length = min(ends)
    assert given_ == text[: end if include else end + length]
    assert flow.stopped


@pytest.mark.parametrize("samples", [2, 3, 5, 6, 7])
def test_equal_confidences_have_their_own_value_for_a_mean(samples):
    """A float below would be in another band."""
    for hundredths in range(101):
        assert mean_confidence([hundredths / 100] * samples) == hundredths / 100
