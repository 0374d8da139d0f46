"""The mean of several confidences, and strings that end an answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.serving.output_stream import StopStrings, mean_confidence


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
    flow = StopStrings(stops, include=include)
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
