"""The communication groups of the rollout engines: each rank alone (rollout tensor and pipeline parallelism 1).

MindSpeed-RL reads them from ``vllm.distributed.parallel_state`` and from its own ``vllm_parallel_state``.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.mindspeed_host import stubs


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """What MindSpeed-RL reads of a vLLM group coordinator."""

    device_group: Any
    first_rank: int
    rank_in_group: int = 0
    world_size: int = 1
    is_last_rank: bool = True
    is_first_rank: bool = True


_group: _RankGroup | None = None


def initialize() -> None:
    """Make the groups; collective over all ranks, once."""
    global _group
    if _group is not None:
        return
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    groups = [torch.distributed.new_group([member]) for member in range(world)]
    _group = _RankGroup(device_group=groups[rank], first_rank=rank)
    state = importlib.import_module("mindspeed_rl.models.rollout.vllm_adapter.vllm_parallel_state")
    # MindSpeed-RL's, which nothing public sets but vLLM's groups.
    state._TP_GROUP_RANKS = [[member] for member in range(world)]  # type: ignore[attr-defined]  # noqa: SLF001


def _own_group() -> _RankGroup:
    if _group is None:
        raise RuntimeError("the rollout engine has not been built yet")
    return _group


def install() -> None:
    """Answer for ``vllm.distributed.parallel_state``."""
    module = "vllm.distributed.parallel_state."
    for name in ("tensor_model_parallel_group", "pipeline_model_parallel_group", "tp_group", "pp_group"):
        stubs.ANSWERS[f"{module}get_{name}"] = _own_group
    for name in ("get_tensor_model_parallel_rank", "get_context_parallel_rank"):
        stubs.ANSWERS[module + name] = lambda: 0
    stubs.ANSWERS[module + "get_tensor_model_parallel_world_size"] = lambda: 1
