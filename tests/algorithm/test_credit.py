"""From judged responses to advantages on tokens: by hand, method by method."""

import math

import pytest
import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.rewards import METHODS, training_method

UP = 1 / math.sqrt(2)  # (x - mean) / sample deviation of two unequal numbers


def credit(correct, confidence, confidence_lengths, response_lengths, width, method="coca", **choices):
    rule = CreditRule(training_method(method), **{"eps": 0.0, **choices})
    return rule(
        torch.tensor([correct]),
        torch.tensor([confidence], dtype=torch.float64),
        torch.tensor(confidence_lengths),
        torch.tensor(response_lengths),
        width,
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
