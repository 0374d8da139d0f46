"""The recorder of collectives, in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.support.collectives import RecordCollectives, differences


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


def test_collectives_of_forward_and_backward_are_recorded(group):
    x = torch.ones(2, 3, requires_grad=True)
    with RecordCollectives() as record:
        dist.broadcast(torch.ones(4, dtype=torch.int64), src=0)
        _Reduced.apply(x).sum().backward()
    dist.barrier()
    assert [(name, members, tensors) for name, members, tensors in record.calls] == [
        ("broadcast", [0], ["(4,) torch.int64"]),
        ("allreduce", [0], ["(2, 3) torch.float32"]),
    ]


REDUCE, GATHER = ("allreduce", [0, 1], ["(2,) torch.float32"]), ("allgather", [0, 1], ["(2,) torch.float32"])
THERE, BACK = ("message", [0, 1], ["(2,) torch.float32"]), ("message", [1, 0], ["(2,) torch.float32"])


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ([THERE, BACK, THERE, REDUCE], [BACK, REDUCE, THERE, THERE], 0),
        ([REDUCE, GATHER], [REDUCE], 1),
        ([REDUCE, GATHER], [GATHER, REDUCE], 1),
        ([REDUCE], [("allreduce", [0, 1], ["(3,) torch.float32"])], 1),
        ([REDUCE], [("allreduce", [0, 1], ["(2,) torch.bfloat16"])], 1),
        ([REDUCE], [("allreduce", [1], ["(2,) torch.float32"])], 1),
        ([THERE, THERE, BACK], [THERE], 2),
    ],
)
def test_ranks_that_issue_different_calls_are_found(first, second, count):
    assert len(differences([first, second])) == count
