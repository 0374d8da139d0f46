"""The actor loss under Megatron's averages is the objective of the whole mini-batch, however it is cut.

Megatron divides a microbatch's loss by the number of microbatches and averages gradients over ranks; so do the tests.
MindSpeed-RL is a stub whose base class returns the log-probabilities.
"""

import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.objective import SegmentStatistics, segment_objective
from coca_mindspeed.algorithm.parsing import SEGMENTS
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SEGMENT_ENDS
from coca_mindspeed.mindspeed.stages.metrics import divide_ratios
from coca_mindspeed.mindspeed.start.process import CocaSettings

ROWS, WIDTH = 8, 6
MEANS = SegmentStatistics(*torch.zeros(4)).means()
UTILITIES = (".utils", ".utils.compute", ".utils.utils")
AGGREGATIONS = ("sum", "token_mean", "segment_mean")


class _FakeBase:
    def compute_log_probs(self, output, batch, **_):
        return output, torch.zeros_like(output)


@pytest.fixture
def actor_loss(monkeypatch):
    for name in ("", ".models", ".models.loss", ".models.loss.base_loss_func", *UTILITIES):
        monkeypatch.setitem(sys.modules, f"mindspeed_rl{name}", types.ModuleType(name))
    sys.modules["mindspeed_rl.models.loss.base_loss_func"].BaseLossFunc = _FakeBase  # type: ignore[attr-defined]
    compute = sys.modules["mindspeed_rl.utils.compute"]
    compute.compute_kl_penalty = lambda a, b, kind: (a - b).square()  # type: ignore[attr-defined]
    compute.get_parallel_state = lambda: None  # type: ignore[attr-defined]
    saved: list[dict[str, Tensor]] = []
    probe = SimpleNamespace(save_data=saved.append, saved=saved)
    sys.modules["mindspeed_rl.utils.utils"].MsProbe = probe  # type: ignore[attr-defined]
    import coca_mindspeed.mindspeed.stages.actor_loss as module

    yield module
    sys.modules.pop("coca_mindspeed.mindspeed.stages.actor_loss")


def _loss(module, monkeypatch, *, reference=False, **coca):
    settings = SimpleNamespace(coca=CocaSettings(**coca), reference=reference)
    monkeypatch.setattr(module, "process_settings", lambda: settings)
    loss = module.SegmentActorLoss()
    loss.add_loss_meta_info({"clip_ratio": 0.2, "kl_ctrl": SimpleNamespace(value=0.5), "kl_penalty": "mse"})
    return loss


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=generator)
    shape = (ROWS, WIDTH)
    return {
        "log_probs": torch.randn(shape, generator=generator) - 2,
        "old_log_prob": torch.randn(shape, generator=generator) - 2,
        "ref_log_prob": torch.randn(shape, generator=generator) - 2,
        "advantages": torch.randn(shape, generator=generator),
        "response_length": lengths[:, None].int(),
        SEGMENT_ENDS: torch.stack([torch.randint(0, 3, (ROWS,), generator=generator), lengths], dim=1).int(),
        ROLLOUT_LOG_PROBS: torch.randn(shape, generator=generator) - 2,
    }


def _whole(batch, aggregation):
    """Gradient of the objective of the whole batch with respect to the log-probabilities."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    masks = segment_masks(batch[SEGMENT_ENDS].long(), SEGMENTS["first"], WIDTH)
    segment_objective(
        log_probs, batch["old_log_prob"], batch["advantages"], masks, aggregation=aggregation
    ).loss.backward()
    assert log_probs.grad is not None
    return log_probs.grad


def _as_megatron(module, loss, batch, ranks):
    """The gradient after Megatron's two averages; ``ranks`` lists the rows of every microbatch of every rank."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    statistics = []
    tokens = int(batch["response_length"].sum())
    for microbatches in ranks:
        rows = sum(map(len, microbatches))
        loss.mini_batch = module.MiniBatch(rows=rows, tokens=tokens, ranks=len(ranks))
        for chosen in microbatches:
            part = {name: values[chosen] for name, values in batch.items() if name != "log_probs"}
            value, found = loss.compute_loss(
                log_probs[chosen], part, actual_micro_batch_size=rows / len(microbatches), use_dynamic_bsz=True
            )
            (value / len(microbatches) / len(ranks)).backward()
            statistics.append(found)
    assert log_probs.grad is not None
    return log_probs.grad, statistics


CUTS = {
    "one plain batch": [[list(range(8))]],
    "microbatches": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "uneven microbatches": [[[0], [1, 2, 3, 4, 5], [6, 7]]],
    "ranks": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    "uneven microbatches on ranks": [[[0], [1, 2, 3]], [[4, 5], [6], [7]]],
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_does_not_depend_on_the_cut(actor_loss, monkeypatch, batch, cut, aggregation):
    loss = _loss(actor_loss, monkeypatch, method={"loss_aggregation": aggregation})
    gradient, _ = _as_megatron(actor_loss, loss, batch, CUTS[cut])
    torch.testing.assert_close(gradient, _whole(batch, aggregation))


def test_statistics_of_microbatches_average_to_those_of_the_batch(actor_loss, monkeypatch, batch):
    def averaged(cut):
        _, rows = _as_megatron(actor_loss, _loss(actor_loss, monkeypatch), batch, CUTS[cut])
        return divide_ratios({name: sum(row[name] for row in rows) / len(rows) for name in rows[0]})

    whole, parts = averaged("one plain batch"), averaged("microbatches")
    assert parts == pytest.approx(whole, rel=1e-4)
    assert 0 < whole["answer/clip_fraction"] < 1
    # The names of the local engine; what is MindSpeed-RL's own keeps its name.
    of_segments = {f"{segment}/{name}" for segment in ("confidence", "answer") for name in (*MEANS, "entropy")}
    assert {*of_segments, "rollout/entropy", "rollout/log_prob_gap", "actor/pg_loss"} <= whole.keys()
    inside = torch.arange(WIDTH) < batch["response_length"]
    gap = (batch["old_log_prob"] - batch[ROLLOUT_LOG_PROBS]).abs()[inside].mean()
    assert whole["rollout/log_prob_gap"] == pytest.approx(float(gap), rel=1e-5)
    masks = segment_masks(batch[SEGMENT_ENDS].long(), SEGMENTS["first"], WIDTH)
    for name, mask in {**masks, "rollout": inside}.items():
        entropy = -batch["old_log_prob"][mask].mean()
        assert whole[f"{name}/entropy"] == pytest.approx(float(entropy), rel=1e-5), name
    saved = sys.modules["mindspeed_rl.utils.utils"].MsProbe.saved
    assert saved[0].keys() >= {"old_log_prob", "log_prob", "advantages", "loss"}


@pytest.mark.parametrize("last_stage", [True, False])
def test_the_peak_memory_of_an_update_is_logged(actor_loss, monkeypatch, batch, last_stage):
    """Once a mini-batch, without the memory of the rollout before it; other pipeline stages have no statistics."""
    device = SimpleNamespace(peak=50 * 2**30)
    device.reset_peak_memory_stats = lambda: setattr(device, "peak", 0)
    device.max_memory_allocated = lambda: device.peak
    monkeypatch.setattr(torch, "npu", device, raising=False)
    engine = SimpleNamespace(loss_func=_loss(actor_loss, monkeypatch))
    monkeypatch.setattr(engine.loss_func, "begin_mini_batch", lambda _batch: None)

    def run(_self, _batch, _forward_only):
        device.peak += 3 * 2**30
        return [{"actor/pg_loss": 1.0}, {"actor/pg_loss": 2.0}] if last_stage else []

    hooked = actor_loss.count_mini_batches(run)
    peaks = [row.get("actor/max_memory_allocated_gib") for row in hooked(engine, batch)]
    assert peaks == ([None, 3.0] if last_stage else [])
    assert device.peak == 3 * 2**30
    hooked(engine, batch, forward_only=True)
    assert device.peak == 6 * 2**30


def test_forward_only_and_refusals(actor_loss, monkeypatch, batch):
    loss = _loss(actor_loss, monkeypatch)
    assert loss.compute_loss(batch["log_probs"], batch, forward_only=True) is batch["log_probs"]
    with pytest.raises(TrainingError, match="mini-batch"):
        loss.compute_loss(batch["log_probs"], batch, actual_micro_batch_size=8)
    with pytest.raises(ConfigError, match="entropy_coeff"):
        loss.add_loss_meta_info({"entropy_coeff": 0.1})


def test_without_old_log_probs_the_ratio_is_one(actor_loss, monkeypatch, batch):
    without = {name: values for name, values in batch.items() if name != "old_log_prob"}
    gradient, (statistics,) = _as_megatron(actor_loss, _loss(actor_loss, monkeypatch), without, [[list(range(8))]])
    expected = _whole({**batch, "old_log_prob": batch["log_probs"]}, "sum")
    torch.testing.assert_close(gradient, expected)
    assert statistics["answer/clip_fraction/numerator"] == 0


def test_a_kl_term_is_averaged_over_the_mini_batchs_tokens(actor_loss, monkeypatch, batch):
    loss = _loss(actor_loss, monkeypatch, reference=True)
    gradient, _ = _as_megatron(actor_loss, loss, batch, CUTS["uneven microbatches on ranks"])
    inside = torch.arange(WIDTH) < batch["response_length"]
    # d/dx of 0.5 * mean of (x - reference)^2 over the response tokens
    penalty = torch.where(inside, batch["log_probs"] - batch["ref_log_prob"], 0.0) / inside.sum()
    torch.testing.assert_close(gradient, _whole(batch, "sum") + penalty)


def test_tokens_weigh_by_the_truncated_ratio_to_the_rollout(actor_loss, monkeypatch):
    """By hand: old / rollout = 3 (truncated to 2), 0.5 and, on padding, anything; the policy is the old one."""
    loss = _loss(actor_loss, monkeypatch, rollout_is_threshold=2.0)
    loss.mini_batch = actor_loss.MiniBatch(rows=1, tokens=2, ranks=1)
    log_probs = torch.tensor([[-1.0, -1.0, float("inf")]], requires_grad=True)
    part = {
        "old_log_prob": log_probs.detach(),
        "advantages": torch.tensor([[0.25, -0.75, 9.0]]),
        "response_length": torch.tensor([[2]]),
        SEGMENT_ENDS: torch.tensor([[1, 2]]),
        ROLLOUT_LOG_PROBS: torch.tensor([[-1.0 - math.log(3), -1.0 + math.log(2), 0.0]]),
    }
    value, statistics = loss.compute_loss(log_probs, part, actual_micro_batch_size=1, use_dynamic_bsz=False)
    value.backward()
    assert value.item() == pytest.approx(-(2 * 0.25 - 0.5 * 0.75))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-0.5, 0.375, 0.0]]))
    assert divide_ratios(statistics)["rollout/is_weight"] == pytest.approx(1.25)
