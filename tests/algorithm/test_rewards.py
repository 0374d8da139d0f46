"""Rewards of the five training methods, by hand."""

import pickle

import pytest
import torch

from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.algorithm.rewards import METHODS, brier_reward, group_success_rate, training_method

# Two prompts, G = 4.  Prompt 0: GESR 0.75; its third response is invalid.  Prompt 1: nobody is right, GESR 0.
CORRECT = torch.tensor([[True, True, True, False], [False, False, False, False]])
CONFIDENCE = torch.tensor([[0.75, 1.0, torch.nan, 0.25], [0.0, 0.5, 1.0, 0.1]])
RIGHT = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0] * 4], dtype=torch.float64)
BRIER = torch.tensor([[0.0, -0.0625, -1.0, -0.25], [0.0, -0.25, -1.0, -0.01]], dtype=torch.float64)
RLCR = torch.tensor([[1 - 0.0625, 1.0, 0.0, -0.0625], [0.0, -0.25, -1.0, -0.01]], dtype=torch.float64)


def test_gesr_is_over_all_samples_invalid_ones_too():
    assert group_success_rate(CORRECT).tolist() == [[0.75], [0.0]]


@pytest.mark.parametrize(
    ("name", "stage", "confidence", "answer"),
    [
        ("coca", 0, BRIER, RIGHT),
        ("rlvr", 0, RIGHT, RIGHT),
        ("joint", 0, RIGHT + BRIER, RIGHT + BRIER),
        ("sequential", 0, RIGHT, RIGHT),
        ("sequential", 1, BRIER, BRIER),
        ("rlcr", 0, RLCR, RLCR),
    ],
)
def test_who_earns_what(name, stage, confidence, answer):
    rewards = training_method(name).rewards(CORRECT, CONFIDENCE, stage=stage)
    torch.testing.assert_close(rewards.confidence, confidence)
    torch.testing.assert_close(rewards.answer, answer)


def test_invalid_reward_is_a_parameter():
    rewards = training_method("coca").rewards(CORRECT, CONFIDENCE, invalid_reward=-2.0)
    assert rewards.confidence[0, 2] == -2.0


def test_registry():
    assert list(METHODS) == ["coca", "rlvr", "joint", "sequential", "rlcr"]
    assert {m.system_prompt for n, m in METHODS.items() if n != "rlcr"} == {CONFIDENCE_FIRST_PROMPT}
    assert METHODS["rlcr"].system_prompt == ANSWER_FIRST_PROMPT
    assert METHODS["rlcr"].confidence_position == "last"
    assert METHODS["sequential"].stages == ("accuracy", "confidence")
    assert pickle.loads(pickle.dumps(METHODS)) == METHODS  # noqa: S301
    with pytest.raises(ValueError, match=r"'cocoa'; known methods: coca, rlvr, joint, sequential, rlcr"):
        training_method("cocoa")


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(IndexError):
        training_method("sequential").rewards(CORRECT, CONFIDENCE, stage=2)


@pytest.mark.parametrize("value", [-0.01, 1.01, torch.inf])
def test_a_confidence_outside_of_the_unit_interval_is_refused(value):
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        brier_reward(torch.tensor([[value]]), torch.tensor([[0.5]]))


@pytest.mark.parametrize(
    ("correct", "confidence"),
    [
        (CORRECT.float(), CONFIDENCE),
        (CORRECT[0], CONFIDENCE[0]),
        (CORRECT, CONFIDENCE.to(torch.int64)),
        (CORRECT, CONFIDENCE.to("meta")),
    ],
)
def test_wrong_shapes_dtypes_and_devices_are_refused(correct, confidence):
    with pytest.raises(ValueError, match=r"should be|is on"):
        training_method("coca").rewards(correct, confidence)
