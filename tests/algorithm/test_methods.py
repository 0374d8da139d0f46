"""The training methods: rewards and advantages by hand."""

import pickle

import pytest
import torch

from coca_mindspeed.algorithm.advantages import group_advantages
from coca_mindspeed.algorithm.credit import CreditRule, Normalisation
from coca_mindspeed.algorithm.methods import METHODS, training_method
from coca_mindspeed.algorithm.methods.base import Outcomes
from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, CONFIDENCE_FIRST_PROMPT

N = torch.nan
# Two prompts, G = 4.  Prompt 0: GESR 0.75; its third response is invalid.  Prompt 1: nobody is right, GESR 0.
RIGHT = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0] * 4], dtype=torch.float64)
STATED = torch.tensor([[0.75, 1.0, N, 0.25], [0.0, 0.5, 1.0, 0.1]], dtype=torch.float64)
BRIER = torch.tensor([[0.0, -0.0625, -1.0, -0.25], [0.0, -0.25, -1.0, -0.01]], dtype=torch.float64)
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
    ],
)
def test_who_earns_what(name, stage, confidence, answer):
    credit = CreditRule(training_method(name), stage, separate_format=False)(RIGHT, STATED)
    for found, reward in ((credit.segments["confidence"], confidence), (credit.segments["answer"], answer)):
        assert all(map(torch.equal, found, group_advantages(reward)))
    assert credit.gesr.tolist() == [[0.75], [0.0]]  # over all samples, invalid ones too
    torch.testing.assert_close(credit.confidence_reward, BRIER)


def test_a_response_that_takes_no_part_has_no_reward():
    outcomes = Outcomes(torch.tensor([[1.0, N]]), torch.tensor([[N, N]]), torch.tensor([[1.0]]), None, -2.0)
    assert str(outcomes.brier(outcomes.gesr).tolist()) == "[[-2.0, nan]]"


@pytest.mark.parametrize("name", METHODS)
def test_advantages_depend_on_values_and_not_on_tensors(name):
    method, rule = METHODS[name], CreditRule(METHODS[name], entropy_bonus=0.1)
    outcomes = Outcomes(RIGHT, STATED, RIGHT.mean(1, keepdim=True), torch.full_like(RIGHT, -1.0), -1.0)
    clone = Outcomes(*(t.clone() for t in outcomes[:4]), -1.0)
    one, other = (method.advantages(o, Normalisation(rule, None), method.stages[0]) for o in (outcomes, clone))
    assert one.keys() == other.keys()
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


def test_registry():
    assert list(METHODS) == ["coca", "rlvr", "joint", "sequential", "rlcr"]
    assert {m.system_prompt for n, m in METHODS.items() if n != "rlcr"} == {CONFIDENCE_FIRST_PROMPT}
    assert METHODS["rlcr"].system_prompt == ANSWER_FIRST_PROMPT
    assert METHODS["rlcr"].confidence_position == "last"
    assert METHODS["sequential"].stages == ("accuracy", "confidence")
    assert pickle.loads(pickle.dumps(METHODS)) == METHODS  # noqa: S301
    with pytest.raises(ValueError, match="cocoa"):
        training_method("cocoa")


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(IndexError):
        CreditRule(training_method("sequential"), stage=2)(RIGHT, STATED)
