"""CPU shim of MindSpeed-RL, loaded for ``coca.platform: host`` by ``coca_mindspeed.mindspeed.start.process``.

It runs the real sources of MindSpeed-RL, Megatron-LM, MindSpeed and MindSpeed-LLM on a CPU (or a CUDA GPU).  Stubs
replace packages that need an NPU, device names are translated, and the rollout engine either samples from the actor's
current Megatron weights with transformers, or is MindSpeed-RL's own with vLLM's CPU build.
"""

import sys
from typing import Any

import torch

from coca_mindspeed.utils.packages import after_import
from tests.support.mindspeed_host import devices, rollout_groups, stubs, vllm_cpu
from tests.support.mindspeed_host.operators import OPERATORS


def install(rollout: str = "transformers", release: str = "2.3.0") -> None:
    """Prepare this process before MindSpeed-RL is imported.  Idempotent.

    Args:
        rollout: the rollout engine, ``transformers`` or ``vllm``.
        release: of MindSpeed-RL.
    """
    if rollout == "vllm":
        vllm_cpu.install(release)
    device = devices.install()
    stubs.ANSWERS["torch_npu.npu"] = sys.modules["torch_npu.npu"] = torch.npu  # type: ignore[attr-defined]
    stubs.ANSWERS["acl.rt"] = _AclRuntime
    stubs.ANSWERS.update(OPERATORS)
    if rollout == "vllm":
        vllm_cpu.seed_device_with_cpu()
        stubs.install()
    else:
        rollout_groups.install()
        stubs.install(hiding=("vllm",))
    devices.use_backend_of(device)
    after_import("megatron.core.datasets.utils", _compile_nothing)
    after_import("megatron.core.optimizer.distrib_optimizer", _load_without_gradients)


def _compile_nothing(module: Any) -> None:
    """Skip the index builder of pre-training data, which Megatron compiles into its own checkout."""
    module.compile_helpers = lambda: None


def _load_without_gradients(module: Any) -> None:
    """Megatron copies into the optimizer's weights, which in float32 are the model's own and require gradients."""
    optimizer: Any = module.DistributedOptimizer
    original = optimizer._set_main_param_and_optimizer_states  # noqa: SLF001  Megatron's only step that does so
    optimizer._set_main_param_and_optimizer_states = torch.no_grad()(original)  # noqa: SLF001


class _AclRuntime:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """``(count, error code)``: the NPUs of the largest Ray node; an error before Ray is initialised."""
        import ray

        if not ray.is_initialized():
            return 0, 1
        counts = [int(node.get("Resources", {}).get("NPU", 0)) for node in ray.nodes() if node.get("Alive")]
        most = max(counts, default=0)
        return (most, 0) if most else (0, 1)
