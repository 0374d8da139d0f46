"""Metrics of a batch and rows of a dump, by hand; batches that add up."""

import math

import pytest
import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.scoring.metrics import Mean, batch_metrics, values
from coca_mindspeed.scoring.rows import credit_rows

CORRECT = torch.tensor([[True, False], [True, True]])
CONFIDENCE = torch.tensor([[0.5, 0.0], [0.9, math.nan]], dtype=torch.float64)
CONFIDENCE_LENGTHS, LENGTHS = torch.tensor([1, 1, 1, 1]), torch.tensor([2, 3, 1, 4])


def credit(method="coca"):
    return CreditRule(training_method(method))(CORRECT, CONFIDENCE, CONFIDENCE_LENGTHS, LENGTHS, 4)


def test_by_hand():
    assert values(batch_metrics(CORRECT, CONFIDENCE, LENGTHS, credit())) == pytest.approx(
        {
            "grading/ungradable_share": 0.0,
            "group/dropped_share": 0.0,
            "reward/answer": 0.75,
            "reward/confidence": (0 - 0.25 - 0.01 - 1) / 4,
            "rollout/gesr": 0.75,
            "rollout/invalid_share": 0.25,
            "rollout/accuracy": 0.75,
            "response/length": 2.5,
            "response/confidence_length": 1.0,
            "response/answer_length": 1.5,
            "group/no_confidence_variance_share": 0.0,
            "group/no_answer_variance_share": 0.5,
            "rollout/confidence": 1.4 / 3,
            "rollout/ece": (0.5 + 0 + 0.1) / 3,
            "rollout/auroc": 1.0,
            "rollout/brier": (0.25 + 0 + 0.01) / 3,
        }
    )


def test_ungradable_answers_are_left_out_and_counted():
    """Three groups of two: all gradable, one ungradable (dropped), both ungradable (dropped)."""
    correct = torch.tensor([[True, False], [True, False], [True, True]])
    gradable = torch.tensor([[True, True], [True, False], [False, False]])
    confidence = torch.tensor([[0.5, 0.0], [0.9, 0.2], [0.3, math.nan]], dtype=torch.float64)
    ones = torch.ones(6, dtype=torch.int64)
    rule = CreditRule(training_method("coca"))
    metrics = batch_metrics(correct, confidence, ones, rule(correct, confidence, ones, ones, 1, gradable=gradable))
    # Right, wrong and right: confidences .5, 0 and .9 of answers that were graded.
    assert metrics["rollout/accuracy"] == (pytest.approx(2 / 3), 3)
    assert metrics["reward/answer"] == metrics["rollout/accuracy"]
    assert metrics["rollout/brier"] == (pytest.approx((0.25 + 0 + 0.01) / 3), 3)
    assert metrics["rollout/auroc"] == (1.0, 3)
    assert metrics["reward/confidence"] == (pytest.approx(-0.125), 2)
    assert metrics["rollout/gesr"] == (0.5, 1)
    assert metrics["group/no_answer_variance_share"] == (0.0, 1)
    assert metrics["group/dropped_share"] == (pytest.approx(2 / 3), 3)
    assert metrics["grading/ungradable_share"] == (0.5, 6)
    # Metrics that do not depend on verdicts are over all responses.
    assert metrics["rollout/confidence"] == (pytest.approx(1.9 / 5), 5)
    assert metrics["rollout/invalid_share"] == (pytest.approx(1 / 6), 6)


@pytest.mark.filterwarnings("error")
def test_a_batch_without_a_gradable_answer_is_undefined_and_not_zero():
    nothing = torch.zeros_like(CORRECT)
    earned = CreditRule(training_method("coca"))(CORRECT, CONFIDENCE, CONFIDENCE_LENGTHS, LENGTHS, 4, gradable=nothing)
    metrics = batch_metrics(CORRECT, CONFIDENCE, LENGTHS, earned)
    undefined = {name for name, mean in metrics.items() if mean.weight == 0}
    assert {"reward/answer", "reward/confidence", "rollout/accuracy", "rollout/gesr", "rollout/ece"} <= undefined
    assert metrics["grading/ungradable_share"] == (1.0, 4)
    assert metrics["group/dropped_share"] == (1.0, 2)


def test_answer_first_responses_have_no_confidence_segment():
    metrics = batch_metrics(CORRECT, CONFIDENCE, LENGTHS, credit("rlcr"))
    assert metrics["response/confidence_length"].value == 0
    assert metrics["response/answer_length"].value == 2.5


def test_what_is_undefined_has_no_weight():
    right, silent = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), math.nan, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.int64)
    nothing = CreditRule(training_method("coca"))(right, silent, one, one, 1)
    metrics = batch_metrics(right, silent, one, nothing)
    for name in ("rollout/ece", "rollout/auroc", "rollout/brier", "rollout/confidence"):
        assert math.isnan(metrics[name].value)
        assert metrics[name].weight == 0
    assert metrics["rollout/invalid_share"] == Mean(1.0, 2)
    assert metrics["reward/confidence"] == Mean(-1.0, 2)


@pytest.mark.parametrize("name", ["reward/answer", "reward/confidence", "rollout/brier", "rollout/confidence"])
def test_batches_add_up(name):
    """Means of the halves, weighted, are the means of the whole."""
    rule = CreditRule(training_method("coca"))
    parts = []
    for half in (slice(0, 1), slice(1, 2)):
        rows = slice(half.start * 2, half.stop * 2)
        correct, confidence, lengths = CORRECT[half], CONFIDENCE[half], LENGTHS[rows]
        earned = rule(correct, confidence, CONFIDENCE_LENGTHS[rows], lengths, 4)
        parts.append(batch_metrics(correct, confidence, lengths, earned)[name])
    whole = batch_metrics(CORRECT, CONFIDENCE, LENGTHS, credit())[name]
    assert sum(part.weight for part in parts) == whole.weight
    assert sum(part.value * part.weight for part in parts) / whole.weight == pytest.approx(whole.value)


def test_rows_of_a_dump_say_null_where_there_is_nothing_to_say():
    """The first group has one gradable answer, and is dropped; the second has both."""
    gradable = torch.tensor([[True, False], [True, True]])
    earned = CreditRule(training_method("coca"))(CORRECT, CONFIDENCE, CONFIDENCE_LENGTHS, LENGTHS, 4, gradable=gradable)
    rows = credit_rows(range(4), CORRECT, CONFIDENCE, CONFIDENCE_LENGTHS, LENGTHS, earned)
    assert [row["correct"] for row in rows] == [True, None, True, True]
    assert [row["gesr"] for row in rows] == [None, None, 1.0, 1.0]
    assert [row["confidence_reward"] is None for row in rows] == [True, True, False, False]
    assert [(row["confidence_advantage"], row["answer_advantage"]) for row in rows[:2]] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_dump(dtype):
    """A confidence is shown as it was stated, also where an engine carries it as float32."""
    confidence = torch.tensor([[0.3, 0.0], [0.9, math.nan]], dtype=dtype)
    earned = CreditRule(training_method("coca"), eps=0.0)(CORRECT, confidence, CONFIDENCE_LENGTHS, LENGTHS, 4)
    first, last = credit_rows([0, 3], CORRECT, confidence, CONFIDENCE_LENGTHS, LENGTHS, earned)
    up = 1 / math.sqrt(2)
    assert first == {
        "confidence": 0.3,
        "correct": True,
        "gesr": 0.5,
        "confidence_reward": pytest.approx(-0.04),
        "confidence_advantage": pytest.approx(up),
        "answer_advantage": pytest.approx(up),
        "tokens": 2,
        "confidence_tokens": 1,
    }
    assert (last["confidence"], last["gesr"], last["confidence_reward"]) == (None, 1.0, -1.0)
