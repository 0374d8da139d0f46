"""Gradient norms of the segments: a longer answer's gradient outweighs the confidence's in a sum, and not in means."""

import pytest

from experiments.segment_gradients import norms, warm_policy


@pytest.mark.nightly
def test_a_sum_gives_the_confidence_a_share_that_falls_with_length():
    policy = warm_policy(0, 40)
    short, long = (norms(policy, length, 2, 0)[0] for length in (12, 120))
    ratio = {name: (float(short[name][0] / short[name][1]), float(long[name][0] / long[name][1])) for name in short}
    assert ratio["sum"] == pytest.approx(ratio["token_mean"], rel=1e-4)
    assert ratio["sum"][1] < ratio["sum"][0]
    assert ratio["segment_mean"][1] > 3 * ratio["sum"][1]
