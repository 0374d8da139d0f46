"""The loss of verl's actor, with stand-ins for the three names of verl that it imports."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from coca_mindspeed.algorithm.methods import method_settings

ROWS, WIDTH, CONFIDENCE = 8, 6, 2
LENGTHS = torch.tensor([6, 3, 5, 6, 4, 6, 2, 5])


class Batch(dict):
    """The part of verl's TensorDict that the loss reads; all rows are padded already."""

    def select(self, *names):
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self):
        return self


@pytest.fixture
def loss_class(monkeypatch):
    metric, padding = ModuleType("verl.utils.metric"), ModuleType("verl.workers.utils.padding")
    metric.AggregationType, metric.Metric = SimpleNamespace(SUM="sum"), SimpleNamespace
    padding.no_padding_2_padding = lambda log_probs, data: log_probs
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (metric, padding):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "coca_mindspeed.verl.segment_loss"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).SegmentLoss
    del sys.modules[name]


def batch(rows, ranks):
    random = torch.Generator().manual_seed(0)
    inside = torch.arange(WIDTH) < LENGTHS[:, None]
    columns = {
        "response_mask": inside,
        "old_log_probs": -torch.rand(ROWS, WIDTH, generator=random),
        "advantages": torch.randn(ROWS, WIDTH, generator=random).where(inside, 0),
        "segment_ends": torch.stack([torch.full((ROWS,), CONFIDENCE), LENGTHS], dim=1),
    }
    mine = {name: column[rows] for name, column in columns.items()}
    # verl gives the sizes of the mini-batch on all ranks to each of them.
    return Batch(mine, global_batch_size=ROWS, batch_num_tokens=int(LENGTHS.sum()), dp_size=ranks)


@pytest.mark.parametrize("aggregation", ["sum", "token_mean", "segment_mean"])
def test_the_mean_over_ranks_is_the_gradient_of_the_whole_mini_batch(loss_class, aggregation):
    """Verl adds up the microbatches of a rank and averages over ranks."""
    loss_of = loss_class(method_settings(loss_aggregation=aggregation))
    log_probs = (-torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))).requires_grad_()
    gradients = []
    for ranks in (1, 2, 4):
        total = torch.zeros(ROWS, WIDTH)
        for rank in range(ranks):
            rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
            for microbatch in torch.arange(ROWS)[rows].chunk(2):
                loss, _ = loss_of({"log_probs": log_probs[microbatch]}, batch(microbatch, ranks))
                total += torch.autograd.grad(loss, log_probs)[0] / ranks
        gradients.append(total)
    assert float(gradients[0].abs().max()) > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
