"""Importance weights and the gap between two engines: by hand, at the edges of floating point, and in expectation."""

import math

import pytest
import torch

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.algorithm.importance import engine_gap, truncated_importance
from coca_mindspeed.algorithm.objective import segment_objective

INSIDE = torch.tensor([[True, True, True, False]])


def logs(*probabilities: float, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=dtype).log()


def test_weights_by_hand():
    """0.6 / 0.3 = 2 stays below the cap, 0.9 / 0.1 = 9 does not, 0.2 / 0.8 = 1/4 is not lifted; padding is 1."""
    old, engine = logs(0.6, 0.9, 0.2, 0.0), logs(0.3, 0.1, 0.8, 0.5)
    weights = truncated_importance(old, engine, INSIDE, cap=4.0)
    assert weights.tolist()[0] == pytest.approx([2.0, 4.0, 0.25, 1.0], rel=1e-12)
    assert truncated_importance(old, engine, INSIDE, cap=1.0).tolist()[0] == pytest.approx([1.0, 1.0, 0.25, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_that_agree_weigh_exactly_one(dtype):
    old = logs(0.6, 0.9, 0.2, 0.5, dtype=dtype)
    weights = truncated_importance(old, old.clone(), INSIDE, cap=2.0)
    assert weights.dtype == dtype
    assert torch.equal(weights, torch.ones(1, 4, dtype=dtype))
    assert engine_gap(old, old.clone(), INSIDE) == (0.0, 0.0, 1.0, 0.0)


def test_weights_have_no_gradient():
    old = logs(0.6, 0.9, 0.2, 0.5).requires_grad_()
    assert not truncated_importance(old, logs(0.3, 0.1, 0.8, 0.5), INSIDE, cap=4.0).requires_grad


def test_what_overflows_is_cut_and_what_is_no_number_stays_none():
    old = torch.tensor([[0.0, -200.0, 0.0, math.nan]])
    engine = torch.tensor([[-200.0, 0.0, -math.inf, 0.0]])
    assert truncated_importance(old, engine, INSIDE, cap=2.0).tolist() == [[2.0, 0.0, 2.0, 1.0]]
    assert math.isnan(truncated_importance(old, engine, torch.ones(1, 4, dtype=torch.bool), cap=2.0)[0, 3])
    gap = engine_gap(old, torch.tensor([[-200.0, 0.0, 0.0, 0.0]]), INSIDE)
    assert gap.largest == 200.0
    assert math.isfinite(gap.ratio)


def test_gap_by_hand():
    """Ratios 2, 9 and 1/4; padding is not counted, whatever it holds."""
    gap = engine_gap(logs(0.6, 0.9, 0.2, 0.0), logs(0.3, 0.1, 0.8, 0.0), INSIDE)
    sizes = [math.log(2), math.log(9), math.log(4)]
    assert gap.mean == pytest.approx(sum(sizes) / 3)
    assert gap.largest == pytest.approx(math.log(9))
    assert gap.ratio == pytest.approx((2 + 9 + 0.25) / 3)
    assert gap.kl == pytest.approx(((2 - 1 - math.log(2)) + (9 - 1 - math.log(9)) + (0.25 - 1 + math.log(4))) / 3)


def test_the_gap_is_summed_in_float64():
    """A million gaps of 1e-4: float32 would lose them beside their sum."""
    old = torch.full((1000, 1000), -1.0)
    gap = engine_gap(old + 1e-4, old, torch.ones(1000, 1000, dtype=torch.bool))
    assert gap.mean == pytest.approx(float(torch.tensor(-1.0) + 1e-4) + 1.0, rel=1e-9)


def test_weighted_terms_estimate_what_the_policy_itself_would():
    """Exactly: the sum over tokens of mu times weight times A is the sum of pi times A, where no weight is cut."""
    generator = torch.Generator().manual_seed(0)
    mu, pi = torch.rand(2, 1, 6, generator=generator, dtype=torch.float64).softmax(-1)
    advantage = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    inside = torch.ones(1, 6, dtype=torch.bool)
    weights = truncated_importance(pi.log(), mu.log(), inside, cap=100.0)
    assert float((mu * weights * advantage).sum()) == pytest.approx(float((pi * advantage).sum()), rel=1e-12)


def test_in_the_objective_by_hand():
    """The tokens of the objective's own example, weighed by 1/2, 3 and 2: the clip looks at the ratio alone."""
    ratio = torch.tensor([[1.5, 0.5, 0.5, 1.0]], dtype=torch.float64).requires_grad_()
    masks = SegmentMasks(torch.tensor([[True, True, False, False]]), torch.tensor([[False, False, True, False]]))
    advantages = torch.tensor([[1.0, 1.0, -2.0, math.nan]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 3.0, 2.0, math.nan]], dtype=torch.float64)
    old = torch.zeros(1, 4, dtype=torch.float64)
    values = {"sum": 0.6 + 1.5 - 3.2, "token_mean": (0.6 + 1.5 - 3.2) / 3, "segment_mean": (0.6 + 1.5) / 2 - 3.2}
    for name, value in values.items():
        result = segment_objective(ratio.log(), old, advantages, masks, aggregation=name, weights=weights)
        assert result.loss.item() == pytest.approx(-value)
        assert result.confidence.means()["clip_fraction"] == 0.5
        assert result.confidence.means()["advantage"] == 1.0
    objective = segment_objective(ratio.log(), old, advantages, masks, weights=weights)
    (gradient,) = torch.autograd.grad(objective.loss, ratio)
    assert gradient.tolist()[0] == pytest.approx([0.0, -3.0, 0.0, 0.0])  # 1.5 and 0.5 against it are cut


def test_weights_of_one_change_no_bit():
    generator = torch.Generator().manual_seed(1)
    log_probs, old, advantages = torch.randn(3, 5, 7, generator=generator)
    masks = SegmentMasks(torch.ones(5, 7, dtype=torch.bool), torch.zeros(5, 7, dtype=torch.bool))
    plain = segment_objective(log_probs, old, advantages, masks)
    weighed = segment_objective(log_probs, old, advantages, masks, weights=torch.ones(5, 7))
    assert torch.equal(plain.loss, weighed.loss)


def test_mistakes_are_named():
    old = logs(0.6, 0.9, 0.2, 0.5)
    with pytest.raises(ValueError, match=r"cap should be at least 1, found 0\.5"):
        truncated_importance(old, old, INSIDE, cap=0.5)
    with pytest.raises(ValueError, match="cap should be at least 1, found nan"):
        truncated_importance(old, old, INSIDE, cap=math.nan)
    with pytest.raises(ValueError, match=r"engine_log_probs should be \[batch, tokens\] \(1, 4\), found \(1, 3\)"):
        truncated_importance(old, old[:, :3], INSIDE, cap=2.0)
    with pytest.raises(ValueError, match="no token to compare"):
        engine_gap(old, old, ~INSIDE & False)
    masks = SegmentMasks(INSIDE, ~INSIDE)
    with pytest.raises(ValueError, match="weights should have no gradient"):
        segment_objective(old, old, old, masks, weights=old.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"weights should be \[batch, tokens\]"):
        segment_objective(old, old, old, masks, weights=old[0])
