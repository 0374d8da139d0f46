"""The objective: by hand, its gradient, its aggregations, and microbatches that add up to the batch."""

import math

import pytest
import torch

from coca_mindspeed.algorithm.advantages import segment_masks, token_advantages
from coca_mindspeed.algorithm.objective import segment_objective, truncated_weights

AGGREGATIONS = ["sum", "token_mean", "segment_mean"]


def batch(size=6, width=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (size,), generator=generator)
    confidence = torch.minimum(lengths, torch.randint(0, 5, (size,), generator=generator))
    log_probs = -torch.rand(size, width, generator=generator, dtype=torch.float64)
    old = log_probs + 0.4 * torch.randn(size, width, generator=generator, dtype=torch.float64)
    a, b = torch.randn(2, size, generator=generator)
    ends = torch.stack([confidence, lengths], dim=1)
    advantages = token_advantages([a, b], ends, width).double()
    return log_probs, old, advantages, segment_masks(ends, ("confidence", "answer"), width)


def masks_of(confidence, answer):
    return {"confidence": confidence, "answer": answer}


def test_by_hand():
    """One response: two confidence tokens with A = 1, one answer token with A = -2; one token of padding."""
    ratio = torch.tensor([[1.5, 0.5, 0.5, 1.0]])
    masks = masks_of(torch.tensor([[True, True, False, False]]), torch.tensor([[False, False, True, False]]))
    advantages = torch.tensor([[1.0, 1.0, -2.0, 0.0]])
    result = {
        name: segment_objective(ratio.log(), torch.zeros(1, 4), advantages, masks, aggregation=name)
        for name in AGGREGATIONS
    }
    # min(1.5, 1.2) = 1.2;  min(0.5, 0.8) = 0.5;  min(-1.0, -1.6) = -1.6
    assert result["sum"].loss.item() == pytest.approx(-(1.2 + 0.5 - 1.6))
    assert result["token_mean"].loss.item() == pytest.approx(-(1.2 + 0.5 - 1.6) / 3)
    assert result["segment_mean"].loss.item() == pytest.approx(-((1.2 + 0.5) / 2 - 1.6))
    confidence, answer = result["sum"].segments["confidence"].means(), result["sum"].segments["answer"].means()
    assert confidence["clip_fraction"] == 0.5  # 1.5 is cut off, 0.5 with a positive advantage is not
    assert answer["clip_fraction"] == 1.0
    assert confidence["advantage"] == 1.0
    assert answer["advantage"] == -2.0
    assert confidence["kl"] == pytest.approx(((1.5 - 1 - math.log(1.5)) + (0.5 - 1 - math.log(0.5))) / 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_against_a_plain_loop(aggregation):
    log_probs, old, advantages, masks = batch()
    expected = 0.0
    all_tokens = int((masks["confidence"] | masks["answer"]).sum())
    for i in range(len(log_probs)):
        for mask in masks.values():
            tokens = mask[i].nonzero().flatten().tolist()
            for t in tokens:
                rho, a = math.exp(log_probs[i, t] - old[i, t]), advantages[i, t].item()
                term = min(rho * a, min(max(rho, 0.8), 1.2) * a)
                scale = {"sum": 1 / 6, "token_mean": 1 / all_tokens, "segment_mean": 1 / len(tokens) / 6}
                expected += term * scale[aggregation]
    loss = segment_objective(log_probs, old, advantages, masks, aggregation=aggregation).loss
    assert loss.item() == pytest.approx(-expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_against_finite_differences(aggregation):
    log_probs, old, advantages, masks = batch(seed=1)
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: segment_objective(x, old, advantages, masks, aggregation=aggregation).loss, log_probs
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_microbatches_add_up_to_the_batch(aggregation, size):
    log_probs, old, advantages, masks = batch()
    log_probs.requires_grad_()
    whole = segment_objective(log_probs, old, advantages, masks, aggregation=aggregation)
    (gradient,) = torch.autograd.grad(whole.loss, log_probs)
    tokens = int((masks["confidence"] | masks["answer"]).sum())
    parts = []
    for rows in torch.arange(6).split(size):
        part = (log_probs[rows], old[rows], advantages[rows], {name: m[rows] for name, m in masks.items()})
        parts.append(segment_objective(*part, aggregation=aggregation, responses=6, tokens=tokens))
    (sum_of_gradients,) = torch.autograd.grad(sum(p.loss for p in parts), log_probs)
    torch.testing.assert_close(sum_of_gradients, gradient)
    total = parts[0].segments["confidence"]
    for part in parts[1:]:
        total = total + part.segments["confidence"]
    assert total.means() == pytest.approx(whole.segments["confidence"].means())


@pytest.mark.parametrize("garbage", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_padding_may_hold_anything(garbage):
    log_probs, old, advantages, masks = batch()
    inside = masks["confidence"] | masks["answer"]
    clean = segment_objective(log_probs, old, advantages, masks)
    dirty = torch.where(inside, log_probs, garbage).requires_grad_()
    result = segment_objective(dirty, old, torch.where(inside, advantages, garbage), masks)
    assert result.loss.item() == clean.loss.item()
    (gradient,) = torch.autograd.grad(result.loss, dirty)
    assert bool((gradient[~inside] == 0).all())
    assert bool(gradient.isfinite().all())


def test_an_empty_segment_counts_nothing():
    masks = masks_of(torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool))
    result = segment_objective(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), masks, aggregation="segment_mean"
    )
    assert result.loss.item() == -1.0
    assert result.segments["confidence"].means() == {"clip_fraction": 0.0, "kl": 0.0, "advantage": 0.0}


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, torch.zeros(6, 8), "old_log_probs should be"),
        (2, torch.zeros(6), "advantages should be"),
        (2, torch.zeros(6, 9, device="meta"), "advantages should be .* on meta"),
        (2, torch.zeros(6, 9, dtype=torch.int64), "advantages should be float"),
        (3, masks_of(torch.zeros(6, 9), torch.zeros(6, 9)), r"masks\['confidence'\] should be bool"),
    ],
)
def test_mismatches_raise(position, value, message):
    arguments = list(batch())
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        segment_objective(*arguments)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean'; known: sum, token_mean, segment_mean"):
        segment_objective(*batch(), aggregation="mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("log_ratio", [59.0, 61.0, 88.0, 89.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_beyond_float32_that_the_clip_holds(aggregation, log_ratio, advantage):
    """The clip cuts the token off: its gradient is 0, not 0 * inf, and its neighbours keep theirs."""
    log_probs = torch.tensor([[log_ratio, 0.1]], requires_grad=True)
    masks = masks_of(torch.tensor([[True, False]]), torch.tensor([[False, True]]))
    result = segment_objective(
        log_probs, torch.zeros(1, 2), torch.tensor([[advantage, 1.0]]), masks, aggregation=aggregation
    )
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    parts = 2 if aggregation == "token_mean" else 1
    assert result.loss.item() == pytest.approx(-(1.2 * advantage + math.exp(0.1)) / parts)
    assert gradient[0].tolist() == pytest.approx([0.0, -math.exp(0.1) / parts])
    assert all(math.isfinite(value) for value in result.segments["confidence"].means().values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_tokens_at_all(aggregation):
    """A microbatch of empty responses adds nothing; it is not 0 / 0."""
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    log_probs = torch.zeros(2, 3, requires_grad=True)
    for tokens in (None, 0):
        given = (log_probs, torch.zeros(2, 3), torch.ones(2, 3), masks_of(nothing, nothing))
        result = segment_objective(*given, aggregation=aggregation, tokens=tokens)
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        assert result.loss.item() == 0
        assert gradient.tolist() == [[0.0] * 3] * 2


def test_truncated_weights_by_hand():
    old, rollout = torch.tensor([0.6, 0.1, 0.5]).log(), torch.tensor([0.3, 0.2, 0.1]).log()
    torch.testing.assert_close(truncated_weights(old, rollout, 3.0), torch.tensor([2.0, 0.5, 3.0]))
