"""The CPU shim with a witness: saves what the advantage task reads and writes to ``COCA_TEST_ADVANTAGES``.

Beside the columns that the stage asks for, each file holds the tokens that were sampled.
"""

import itertools
import os
from pathlib import Path

import torch

from coca_mindspeed.mindspeed.stages import advantage_task
from coca_mindspeed.mindspeed.stages.dock import read_rows
from tests.support import mindspeed_host
from tests.support.mindspeed_host import vllm_cpu  # noqa: F401  the driver asks for it

_NUMBER = itertools.count()


def install(rollout="transformers", release="2.3.0"):
    """Install the shim, and wrap the advantage task's reading and writing."""
    mindspeed_host.install(rollout, release)
    if not hasattr(advantage_task.batches, "__wrapped__"):
        advantage_task.batches, advantage_task.put = (
            _keeping_batches(advantage_task.batches),
            _keeping_put(advantage_task.put),
        )


def _save(name, values):
    directory = Path(os.environ["COCA_TEST_ADVANTAGES"])
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(values, directory / f"{os.getpid()}_{next(_NUMBER):04d}_{name}.pt")


def _keeping_batches(original):
    def batches(dock, consumer, columns, count, *, assigned, stall_timeout):
        for rows in original(dock, consumer, columns, count, assigned=assigned, stall_timeout=stall_timeout):
            tokens = read_rows(dock, ["responses", "response_length"], rows.indexes, stall_timeout=stall_timeout)
            _save("read", {"indexes": rows.indexes, **rows.columns, **tokens})
            yield rows

    batches.__wrapped__ = original
    return batches


def _keeping_put(original):
    def put(dock, columns, indexes):
        _save("written", {"indexes": list(indexes), "advantages": columns["advantages"]})
        original(dock, columns, indexes)

    return put
