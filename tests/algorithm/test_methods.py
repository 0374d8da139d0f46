"""The training methods: rewards and advantages by hand."""

import math
import pickle

import pytest
import torch

from coca_mindspeed.algorithm.advantages import group_advantages
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import METHODS, method_settings, training_method
from coca_mindspeed.algorithm.methods.base import GroupOutcomes
from coca_mindspeed.algorithm.parsing import parse_response

N = torch.nan
# Two prompts, G = 4.  Prompt 0: GESR 0.75; its third response is invalid.  Prompt 1: nobody is right, GESR 0.
RIGHT = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0] * 4], dtype=torch.float64)
STATED = torch.tensor([[0.75, 1.0, N, 0.25], [0.0, 0.5, 1.0, 0.1]], dtype=torch.float64)
BRIER = torch.tensor([[0.0, -0.0625, -1.0, -0.25], [0.0, -0.25, -1.0, -0.01]], dtype=torch.float64)
# t = (right + GESR) / 2 is .875, .875, .875 and .375, so -(s - t)^2 / 2
DCPO = torch.tensor([[-(1 / 128), -(1 / 128), -1.0, -(1 / 128)], [0.0, -0.125, -0.5, -0.005]], dtype=torch.float64)
# of s if right, else of 1 - s: ln .75, .999, invalid, .75; .999, .5, .001, .9; divided by ln 1000
LOG = torch.tensor([[0.75, 0.999, 0.001, 0.75], [0.999, 0.5, 0.001, 0.9]], dtype=torch.float64).log() / math.log(1000)
AFTER = torch.tensor([[0.5, 1.0, 1.0, N], [0.0, 0.5, 0.2, 0.1]], dtype=torch.float64)
BRIER_AFTER = torch.tensor([[-0.25, 0.0, 0.0, -1.0], [0.0, -0.25, -0.04, -0.01]], dtype=torch.float64)
RLCR = torch.tensor([[1 - 0.0625, 1.0, 0.0, -0.0625], [0.0, -0.25, -1.0, -0.01]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "stage", "confidence", "answer"),
    [
        ("coca", 0, BRIER, RIGHT),
        ("rlvr", 0, RIGHT, RIGHT),
        ("joint", 0, RIGHT + BRIER, RIGHT + BRIER),
        ("sequential", 0, RIGHT, RIGHT),
        ("sequential", 1, BRIER, BRIER),
        ("rlcr", 0, RLCR, RLCR),
        ("dcpo", 0, DCPO, RIGHT),
        ("log_score", 0, LOG, None),
        ("caliber", 0, BRIER, None),
        ("caliber", 1, BRIER, RIGHT),
    ],
)
def test_who_earns_what(name, stage, confidence, answer):
    credit = CreditRule(method_settings(name, separate_format=False), stage)(RIGHT, STATED, stated_after=AFTER)
    after = BRIER_AFTER if (name, stage) == ("caliber", 1) else None
    for segment, reward in {"confidence": confidence, "answer": answer, "confidence_after": after}.items():
        found = credit.segments.get(segment)
        if reward is None:
            assert found is None
        else:
            expected = group_advantages(reward)
            torch.testing.assert_close(found.values, expected.values)
            assert torch.equal(found.varies, expected.varies)
    assert credit.gesr.tolist() == [[0.75], [0.0]]  # over all samples, invalid ones too
    torch.testing.assert_close(credit.confidence_reward, BRIER)


def test_gdpo_adds_the_advantages_of_coca_on_every_token():
    coca, gdpo = (CreditRule(method_settings(name))(RIGHT, STATED).segments for name in ("coca", "gdpo"))
    for advantage in gdpo.values():
        assert torch.equal(advantage.values, coca["confidence"].values + coca["answer"].values)
        assert advantage.varies.tolist() == [True, True]


def test_both_confidences_of_caliber_are_compared_among_their_valid_ones():
    """The second of the fourth response is invalid: being valid is worth 1, 1, 1, 0."""
    found = CreditRule(method_settings("caliber"), 1)(RIGHT, STATED, stated_after=AFTER).segments["confidence_after"]
    valid = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0] * 4])
    expected = group_advantages(BRIER_AFTER.masked_fill(AFTER.isnan(), N)).values + group_advantages(valid).values
    torch.testing.assert_close(found.values, expected)
    with pytest.raises(ValueError, match="caliber needs stated_after"):
        CreditRule(method_settings("caliber"), 0)(RIGHT, STATED)


def test_a_response_that_takes_no_part_has_no_reward():
    outcomes = GroupOutcomes(torch.tensor([[1.0, N]]), torch.tensor([[N, N]]), torch.tensor([[1.0]]), None, -2.0)
    assert str(outcomes.brier(outcomes.gesr).tolist()) == "[[-2.0, nan]]"


def test_registry():
    for method in METHODS.values():
        response = method.system_prompt.rpartition("\n")[2].replace("confidence level here", "0.5")
        assert parse_response(response, position=method.confidence_position).answer.strip() == "answer here"
    positions = {name: method.confidence_position for name, method in METHODS.items()}
    assert {name for name in positions if positions[name] == "last"} == {"rlcr", "dcpo", "log_score"}
    assert {name for name in positions if positions[name] == "both"} == {"caliber"}
    assert METHODS["caliber"].stages == ("warm-up", "train")
    assert METHODS["sequential"].stages == ("accuracy", "confidence")
    assert pickle.loads(pickle.dumps(METHODS)) == METHODS  # noqa: S301
    with pytest.raises(ValueError, match="cocoa"):
        training_method("cocoa")


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="stage"):
        CreditRule(method_settings("sequential"), stage=2)(RIGHT, STATED)
