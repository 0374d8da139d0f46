"""MindSpeed-RL without an NPU: loaded only where a configuration says ``platform: host``.

Nothing here computes anything for a real cluster.  It lets the real MindSpeed-RL, Megatron-LM, MindSpeed and
MindSpeed-LLM sources run on a CPU (or a CUDA GPU), so that the hooks can be tried and tested where there is no NPU:
packages that need one are stood in for, device names are translated, and the rollout engine is replaced by one that
samples from the actor's current Megatron weights, or is MindSpeed-RL's own over vLLM's build for CPUs.
"""

import sys
from typing import Any

import torch

from coca_mindspeed.upstream.after_import import after_import
from tests.support.mindspeed_host import devices, rollout_groups, stand_ins, vllm_cpu
from tests.support.mindspeed_host.operators import OPERATORS


def install(rollout: str = "transformers", release: str = "2.3.0") -> None:
    """Prepare this process; to be called before MindSpeed-RL is imported.  Idempotent.

    Args:
        rollout: the rollout engine, ``transformers`` or ``vllm``.
        release: of MindSpeed-RL.
    """
    if rollout == "vllm":
        vllm_cpu.install(release)
    device = devices.install()
    stand_ins.ANSWERS["torch_npu.npu"] = sys.modules["torch_npu.npu"] = torch.npu  # type: ignore[attr-defined]
    stand_ins.ANSWERS["acl.rt"] = _AclRuntime
    stand_ins.ANSWERS.update(OPERATORS)
    if rollout == "vllm":
        vllm_cpu.seed_like_a_device()
        stand_ins.install()
    else:
        rollout_groups.install()
        stand_ins.install(hiding=("vllm",))
    devices.use_backend_of(device)
    after_import("megatron.core.datasets.utils", _compile_nothing)
    after_import("megatron.core.optimizer.distrib_optimizer", _load_without_gradients)


def _compile_nothing(module: Any) -> None:
    """Megatron compiles an index builder for its pre-training data into its own checkout; prompts need none."""
    module.compile_helpers = lambda: None


def _load_without_gradients(module: Any) -> None:
    """In float32 the optimizer's weights are the model's own, which want a gradient; Megatron copies into them."""
    original = module.DistributedOptimizer._set_main_param_and_optimizer_states
    module.DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(original)


class _AclRuntime:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """``(count, error code)``: the NPUs that each Ray node was started with; an error where that is not known."""
        import ray

        if not ray.is_initialized():
            return 0, 1
        counts = [int(node.get("Resources", {}).get("NPU", 0)) for node in ray.nodes() if node.get("Alive")]
        most = max(counts, default=0)
        return (most, 0) if most else (0, 1)
