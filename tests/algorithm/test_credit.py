"""From judged responses to advantages on tokens: by hand, method by method."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.algorithm.advantages import group_advantages
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.rewards import METHODS, brier_reward, group_success_rate, training_method

UP = 1 / math.sqrt(2)  # (x - mean) / sample deviation of two unequal numbers


def credit(correct, confidence, confidence_lengths, response_lengths, width, method="coca", gradable=None, **choices):
    rule = CreditRule(training_method(method), **{"eps": 0.0, **choices})
    return rule(
        torch.tensor([correct]),
        torch.tensor([confidence], dtype=torch.float64),
        torch.tensor(confidence_lengths),
        torch.tensor(response_lengths),
        width,
        gradable=None if gradable is None else torch.tensor([gradable]),
    )


def test_by_hand():
    """One group of two: r_a = (1, 0), GESR 0.5, s = (0.5, 0), so r_c = (0, -0.25)."""
    result = credit([True, False], [0.5, 0.0], [1, 2], [3, 4], 5)
    torch.testing.assert_close(result.tokens, torch.tensor([[UP, UP, UP, 0, 0], [-UP, -UP, -UP, -UP, 0]]))
    assert result.gesr.tolist() == [[0.5]]
    assert result.confidence_reward.tolist() == [[0.0, -0.25]]
    assert (result.confidence_varies.tolist(), result.answer_varies.tolist()) == ([True], [True])


def test_segments_get_different_advantages():
    """r_a = (1, 0), s = (0, 0.5): the wrong answer has the better confidence."""
    result = credit([True, False], [0.0, 0.5], [1, 2], [3, 3], 3)
    torch.testing.assert_close(result.tokens, torch.tensor([[-UP, UP, UP], [UP, UP, -UP]]))


def test_one_segment_may_have_nothing_to_learn_from():
    result = credit([True, True], [0.9, 0.4], [1, 1], [2, 2], 2)
    torch.testing.assert_close(result.tokens, torch.tensor([[UP, 0], [-UP, 0]]))
    assert (result.confidence_varies.tolist(), result.answer_varies.tolist()) == ([True], [False])


def test_answer_first_responses_have_no_confidence_segment():
    lengths = torch.tensor([4, 2])
    for name, method in METHODS.items():
        expected = [0, 0] if name == "rlcr" else [4, 2]
        assert CreditRule(method).segment_lengths(lengths).tolist() == expected
    # RLCR: 1 - (.5 - 1)^2 = .75 against -(.5)^2 = -.25, on every token
    result = credit([True, False], [0.5, 0.5], [3, 2], [3, 2], 3, method="rlcr")
    torch.testing.assert_close(result.tokens, torch.tensor([[UP] * 3, [-UP, -UP, 0]]))
    assert result.segment_lengths.tolist() == [0, 0]


def test_confidence_reward_is_the_brier_score_whatever_the_method_rewards():
    for name in METHODS:
        result = credit([True, False], [0.5, math.nan], [1, 1], [2, 2], 2, method=name, invalid_reward=-2.0)
        assert result.confidence_reward.tolist() == [[0.0, -2.0]]


def test_choices_reach_the_advantages():
    # r_a = (1, 0): deviation sqrt(1/2) or 1/2, plus eps
    for ddof, deviation in ((1, UP), (0, 0.5)):
        result = credit([True, False], [0.5, 0.5], [0, 0], [1, 1], 1, ddof=ddof, eps=0.25)
        assert result.answer[0].tolist() == pytest.approx([0.5 / (deviation + 0.25), -0.5 / (deviation + 0.25)])


def test_the_stage_decides_what_sequential_rewards():
    first, second = (credit([True, False], [0.0, 0.5], [1, 1], [2, 2], 2, "sequential", stage=s) for s in (0, 1))
    torch.testing.assert_close(first.tokens, torch.tensor([[UP, UP], [-UP, -UP]]))
    torch.testing.assert_close(second.tokens, torch.tensor([[-UP, -UP], [UP, UP]]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(3, 0), (3, 1), (0, 1), (4,), (0, 0)])
def test_a_group_has_at_least_two_responses(shape):
    correct, confidence = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    lengths = torch.ones(correct.numel(), dtype=torch.int64)
    with pytest.raises(ValueError, match="at least 2 responses in a group"):
        CreditRule(training_method("coca"))(correct, confidence, lengths, lengths, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("correct", torch.zeros(1, 2)),
        ("confidence", torch.zeros(1, 3)),
        ("confidence", torch.zeros(1, 2, dtype=torch.int64)),
        ("gradable", torch.ones(2, dtype=torch.bool)),
        ("gradable", torch.ones(1, 2)),
    ],
)
def test_mismatches_are_refused_by_name(name, value):
    given = {"correct": torch.zeros(1, 2, dtype=torch.bool), "confidence": torch.zeros(1, 2), name: value}
    ones = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{name} should be"):
        CreditRule(training_method("coca"))(
            given["correct"], given["confidence"], ones, ones, 1, gradable=given.get("gradable")
        )


def test_an_ungradable_answer_is_no_member_of_its_group():
    """r_a = (1, 0, -), so GESR is 1/2; s = (.5, 0, 1), so r_c = (0, -.25, -)."""
    for third in (True, False):  # what is said of it beside that does not matter
        result = credit([True, False, third], [0.5, 0.0, 1.0], [1, 1, 1], [2, 2, 2], 2, gradable=[True, True, False])
        torch.testing.assert_close(result.tokens, torch.tensor([[UP, UP], [-UP, -UP], [0, 0]]))
        assert result.gesr.tolist() == [[0.5]]
        assert result.confidence_reward[0, :2].tolist() == [0.0, -0.25]
        assert result.confidence_reward[0, 2].isnan()
        assert result.kept.tolist() == [True]


@pytest.mark.parametrize("gradable", [[True, False, False], [False, False, False]])
def test_a_group_of_fewer_than_two_gradable_answers_is_dropped(gradable):
    result = credit([True, False, False], [0.9, 0.1, 0.5], [1, 1, 1], [2, 2, 2], 2, gradable=gradable)
    assert not result.tokens.any()
    assert result.kept.tolist() == result.confidence_varies.tolist() == result.answer_varies.tolist() == [False]
    assert result.gesr.isnan().all()
    assert result.confidence_reward.isnan().all()


def oracle(method, correct, confidence, gradable, invalid_reward, ddof, eps):
    """Advantages of one group by plain arithmetic: (confidence, answer), a number a response."""
    members = [i for i, counts in enumerate(gradable) if counts]
    nothing = [0.0] * len(correct)
    if len(members) < 2:
        return nothing, nothing
    p = sum(correct[i] for i in members) / len(members)
    answer = {i: float(correct[i]) for i in members}

    def brier(i, target):
        return invalid_reward if math.isnan(confidence[i]) else -((confidence[i] - target) ** 2)

    score = {i: brier(i, p) for i in members}
    rewards = {
        "coca": (score, answer),
        "rlvr": (answer, answer),
        "joint": ({i: answer[i] + score[i] for i in members},) * 2,
        "rlcr": ({i: answer[i] + brier(i, answer[i]) for i in members},) * 2,
    }[method]
    results = []
    for reward in rewards:
        mean = sum(reward.values()) / len(members)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in reward.values()) / (len(members) - ddof))
        varies = max(reward.values()) - min(reward.values()) > 1e-9
        results.append(
            [(reward[i] - mean) / (deviation + eps) if i in reward and varies else 0.0 for i in range(len(correct))]
        )
    return tuple(results)


@given(
    st.integers(2, 7).flatmap(
        lambda group: st.lists(
            st.tuples(
                st.lists(st.booleans(), min_size=group, max_size=group),
                st.lists(st.sampled_from([0.0, 0.13, 0.5, 0.77, 1.0, math.nan]), min_size=group, max_size=group),
                st.lists(st.booleans(), min_size=group, max_size=group),
            ),
            min_size=1,
            max_size=5,
        )
    ),
    st.sampled_from(["coca", "rlvr", "joint", "rlcr"]),
    st.sampled_from([0, 1]),
)
def test_against_plain_arithmetic(groups, method, ddof):
    correct, confidence, gradable = (torch.tensor(part) for part in zip(*groups, strict=True))
    ones = torch.ones(correct.numel(), dtype=torch.int64)
    rule = CreditRule(training_method(method), invalid_reward=-1.5, ddof=ddof, eps=0.05)
    found = rule(correct, confidence.double(), ones, 2 * ones, 2, gradable=gradable)
    for row, group in enumerate(groups):
        expected = oracle(method, *group, -1.5, ddof, 0.05)
        for name, wanted in zip(("confidence", "answer"), expected, strict=True):
            assert getattr(found, name)[row].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_where_all_are_gradable_the_numbers_are_those_without_a_mask_bit_for_bit(name):
    draw = torch.Generator().manual_seed(7)
    correct = torch.rand(64, 16, generator=draw) < 0.4
    confidence = torch.rand(64, 16, generator=draw, dtype=torch.float64)
    confidence[torch.rand(64, 16, generator=draw) < 0.1] = math.nan
    ones = torch.ones(correct.numel(), dtype=torch.int64)
    rule = CreditRule(training_method(name))
    found = rule(correct, confidence, ones, ones, 1, gradable=torch.ones_like(correct))
    rewards = rule.method.rewards(correct, confidence)
    for segment in ("confidence", "answer"):
        assert torch.equal(getattr(found, segment), group_advantages(getattr(rewards, segment)))
    assert torch.equal(found.gesr, group_success_rate(correct))
    assert torch.equal(found.confidence_reward, brier_reward(confidence, group_success_rate(correct)))
    assert all(torch.equal(a, b) for a, b in zip(found, rule(correct, confidence, ones, ones, 1), strict=True))
