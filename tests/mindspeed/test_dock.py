"""Packing and unpacking of rows by hand; compared with MindSpeed-RL's functions in tests/integration/mindspeed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from coca_mindspeed.mindspeed.stages.dock import Rows, packed, unpacked


@pytest.fixture(autouse=True)
def _without_tensordict(monkeypatch):
    tensor_dict = SimpleNamespace(from_dict=dict)
    monkeypatch.setitem(sys.modules, "tensordict", SimpleNamespace(TensorDict=tensor_dict))  # type: ignore[arg-type]


def test_rows_are_padded_column_by_column_and_come_back():
    columns = {
        "responses": [torch.tensor([5, 6, 7]), torch.tensor([8])],
        "scores": torch.tensor([[0.5], [1.0]]),
        "log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
    }
    batch = packed(columns)
    assert batch["responses"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["log_probs"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert batch["original_length"].tolist() == [3, 1, 1, 1, 2, 1]
    assert batch["original_length"].dtype == torch.int64
    rows = unpacked(batch)
    assert list(rows) == list(columns)
    for name, expected in columns.items():
        assert [row.tolist() for row in rows[name]] == [row.tolist() for row in expected], name
        assert rows[name][0].dtype == expected[0].dtype
    assert unpacked(rows) is rows  # were not packed
    assert unpacked(None) == {}


def test_a_batch_whose_lengths_are_not_its_rows_is_an_error():
    """And so is a value that is missing: it is not zero."""
    with pytest.raises(RuntimeError):
        Rows({"holes": [torch.ones(1), torch.ones(0)]}, [0, 1]).scalars("holes")
    batch = packed({"scores": torch.ones(3, 1)})
    batch["original_length"] = batch["original_length"][:2]
    with pytest.raises(ValueError, match="zip"):
        unpacked(batch)
