"""Advantages: by hand, against a plain loop, and where variance vanishes."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.algorithm.advantages import Normalisation, group_advantages, segment_masks, token_advantages
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings


def test_by_hand():
    # mean 0.75, sample deviation 0.5, population deviation sqrt(3)/4
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(group_advantages(rewards, eps=0.0).values, torch.tensor([[0.5, 0.5, 0.5, -1.5]]))
    torch.testing.assert_close(
        group_advantages(rewards, ddof=0, eps=0.0).values, torch.tensor([[1.0, 1.0, 1.0, -3.0]]) / math.sqrt(3)
    )
    torch.testing.assert_close(group_advantages(rewards, eps=0.5).values, torch.tensor([[0.25, 0.25, 0.25, -0.75]]))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3, 1e30])
@pytest.mark.parametrize("group", [2, 3, 7, 16])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_teach_exactly_nothing(value, group, eps):
    """Three times 0.1 has a mean that is not 0.1: a tiny deviation over a tiny eps must not become an advantage."""
    assert group_advantages(torch.full((2, group), value), eps=eps).values.tolist() == [[0.0] * group] * 2


@pytest.mark.parametrize(("apart", "varies"), [(5e-11, False), (5e-10, True)])
def test_rewards_are_equal_up_to_rounding_of_the_largest(apart, varies):
    rewards = torch.tensor([[100.0, 100.0 + apart, 100.0]], dtype=torch.float64)
    assert bool(group_advantages(rewards, eps=0.0).values.any()) is varies


@given(
    st.integers(2, 9).flatmap(
        lambda group: st.lists(st.lists(st.floats(-2, 2), min_size=group, max_size=group), min_size=1, max_size=5)
    ),
    st.sampled_from([0, 1]),
    st.sampled_from([1e-6, 0.05]),
)
def test_against_a_plain_loop(rewards, ddof, eps):
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), ddof=ddof, eps=eps).values.tolist()
    for row, advantages in zip(rewards, result, strict=True):
        deviation = (statistics.stdev if ddof else statistics.pstdev)(row)
        for reward, advantage in zip(row, advantages, strict=True):
            expected = 0.0 if len(set(row)) == 1 else (reward - statistics.fmean(row)) / (deviation + eps)
            assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_each_advantage_has_the_deviation_of_its_own_reward():
    rewards = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    normalise = Normalisation("batch")
    first, second = normalise.by_scale(rewards), normalise.of_confidence(2 * rewards, rewards.clamp(min=0))
    assert (first.deviation, second.deviation) == pytest.approx((1.0, 2.0), abs=1e-7)
    assert (first + second).deviation == first.deviation
    assert (normalise.within_group(rewards) + second).deviation == second.deviation
    for scale in ("group", "none"):
        assert Normalisation(scale).by_scale(rewards).deviation == 0.0


_EQUALLY_FAR = [
    # confidences that are equally far from the group's success rate, and who is right
    ([0.1, 0.9, 0.1, 0.9], [1, 1, 0, 0]),
    ([0.3, 0.5, 0.3, 0.5, 0.5], [1, 1, 0, 0, 0]),
    ([0.55, 0.65, 0.65, 0.55, 0.55], [1, 1, 1, 0, 0]),
    ([0.07, 0.93] * 8, [1, 0] * 8),
]


@pytest.mark.parametrize(("confidences", "correct"), _EQUALLY_FAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rewards_that_are_equal_by_definition_teach_nothing(confidences, correct, dtype, eps):
    """Confidences .1 and .9 are equally far from p = .5; rounding must not decide which of them was the better one."""
    credit = CreditRule(method_settings(advantage_eps=eps))(
        torch.tensor([correct], dtype=torch.float64), torch.tensor([confidences], dtype=dtype)
    )
    assert credit.segments["confidence"].values.tolist() == [[0.0] * len(confidences)]
    assert credit.segments["confidence"].varies.tolist() == [False]


@given(
    st.integers(2, 16).flatmap(
        lambda group: st.tuples(
            st.lists(st.integers(0, 100), min_size=group, max_size=group),
            st.lists(st.booleans(), min_size=group, max_size=group),
        )
    )
)
def test_advantages_of_stated_decimals_against_fractions(drawn):
    """Exact arithmetic on the decimals that were stated decides what is equal, and what an advantage is."""
    hundredths, correct = drawn
    p = Fraction(sum(correct), len(correct))
    exact = [-((Fraction(h, 100) - p) ** 2) for h in hundredths]
    advantage = CreditRule(method_settings())(
        torch.tensor([correct]).double(), torch.tensor([[h / 100 for h in hundredths]])
    ).segments["confidence"]
    assert advantage.varies.item() == (len(set(exact)) > 1)
    if len(set(exact)) > 1:
        deviation = math.sqrt(statistics.variance(exact))
        mean = sum(exact) / len(exact)
        expected = [float(reward - mean) / (deviation + 1e-6) for reward in exact]
        assert advantage.values[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_nan_takes_no_part():
    """1 and 0 of four: mean .5, deviation 1/sqrt(2); a group of one has nothing to be compared with."""
    up, n = 1 / math.sqrt(2), math.nan
    found = group_advantages(torch.tensor([[1.0, n, 0.0, n], [n, 1.0, n, n], [n] * 4]), eps=0.0)
    torch.testing.assert_close(found.values, torch.tensor([[up, 0, -up, 0], [0] * 4, [0] * 4]))
    assert found.varies.tolist() == [True, False, False]


def test_tokens_get_their_own_segments_advantage():
    first, second = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, -2.0, -3.0, -4.0]])
    ends = torch.tensor([[2, 4], [0, 5], [3, 3], [0, 0]])
    result = token_advantages([first, second], ends, 5)
    assert result.tolist() == [[1, 1, -1, -1, 0], [-2, -2, -2, -2, -2], [3, 3, 3, 0, 0], [0, 0, 0, 0, 0]]


@given(st.data())
def test_token_advantages_are_the_masks_times_the_advantages(data):
    width = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=6))
    names = "abcd"[: data.draw(st.integers(1, 4))]
    inner = [sorted(data.draw(st.integers(0, length)) for _ in names[1:]) for length in lengths]
    ends = torch.tensor([[*own, length] for own, length in zip(inner, lengths, strict=True)])
    advantages = torch.randn(len(names), len(lengths))
    masks = segment_masks(ends, names, width)
    assert torch.equal(sum(masks.values()).int(), (torch.arange(width) < ends[:, -1:]).int())
    expected = sum(mask * own[:, None] for mask, own in zip(masks.values(), advantages, strict=True))
    assert torch.equal(token_advantages(list(advantages), ends, width), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rewards",
    [*map(torch.zeros, (3, (3, 0), (3, 1))), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[torch.inf, 0.0]])],
)
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards should"):
        group_advantages(rewards)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ends": torch.tensor([[1, 3], [3, 2]])}, "response 1"),
        ({"ends": torch.tensor([[-1, 3], [1, 2]])}, "response 0"),
        ({"width": 2}, "at most 2"),
        ({"ends": torch.tensor([1, 3])}, "ends should be int"),
        ({"ends": torch.tensor([[1.0, 3.0]])}, "ends should be int"),
        ({"ends": torch.tensor([[1], [1]])}, "ends should be int"),
        ({"advantages": [torch.zeros(3)] * 2}, "advantages should be float"),
        ({"advantages": [torch.zeros(2, dtype=torch.int64)] * 2}, "advantages should be float"),
        ({"advantages": [torch.zeros(2, device="meta")] * 2}, "advantages should be .* on meta"),
    ],
)
def test_mismatches_raise(change, message):
    arguments = {"advantages": [torch.zeros(2), torch.zeros(2)], "ends": torch.tensor([[1, 3], [1, 2]]), "width": 3}
    with pytest.raises(ValueError, match=message):
        token_advantages(**{**arguments, **change})
