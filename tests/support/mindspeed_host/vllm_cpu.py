"""Run-time patches that let MindSpeed-RL's ``VLLMInferEngine`` and resharding use vLLM's CPU build.

``patches/vllm_*.yaml`` lists the wrapped definitions with their fingerprints; other sources are refused.
"""

import copy
import importlib
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.upstream.manifest import Hook, Manifest, load_manifests, matching_manifest, stack_of
from coca_mindspeed.utils.packages import after_import

_VARIABLES = {
    "VLLM_USE_V1": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # MindSpeed-RL reaches into an engine in its own process
    "TORCHDYNAMO_DISABLE": "1",
}

_installed = False


def known_vllm(release: str) -> Manifest:
    """The manifest of the installed vLLM, found without importing it; ``release`` is MindSpeed-RL's."""
    pin = stack_of(release).packages["vllm"]
    manifests = [manifest for manifest in load_manifests(package="vllm") if manifest.release == pin]
    if not manifests:
        raise MissingDependencyError(
            f"coca.rollout: vllm needs vLLM {pin} beside MindSpeed-RL {release}, whose CPU build has no manifest; set "
            "coca.rollout: transformers (docs/port.md)"
        )
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"coca.rollout: vllm on platform host needs the CPU build of vLLM {pin}, found none; run in the "
            f"environment that requirements/mindspeed-vllm.sh DIRECTORY {pin} makes, or set "
            "coca.rollout: transformers (docs/port.md)"
        )
    return matching_manifest(Path(spec.origin).parents[1], manifests, package="vllm")


def install(release: str) -> None:
    """Prepare this process before vLLM is imported and device names are translated.  Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    manifest = known_vllm(release)
    os.environ.update(_VARIABLES)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, given back after every rollout
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()  # cached; it refuses two names for one function, as torch.cuda's will be
    hooks: defaultdict[str, list[Hook]] = defaultdict(list)
    for hook in filter(lambda hook: hook.acts, manifest.hooks):
        hooks[hook.target.partition(":")[0]].append(hook)
    for module, its_hooks in hooks.items():
        after_import(module, partial(_wrap, its_hooks))
    for hook in manifest.hooks:
        if hook.target in _PREPARED:
            after_import(*_PREPARED[hook.target])


def seed_device_with_cpu() -> None:
    """Seed the CPU's generator, from which vLLM samples here, where the device's is seeded."""
    torch.npu.manual_seed = torch.manual_seed  # type: ignore[attr-defined]


def _wrap(hooks: list[Hook], module: Any) -> None:
    for hook in hooks:
        owner = module
        *path, name = hook.target.partition(":")[2].split(".")
        for part in path:
            owner = getattr(owner, part)
        ours, _, wrapper = str(hook.replacement).partition(":")
        setattr(owner, name, getattr(importlib.import_module(ours), wrapper)(vars(owner)[name]))


def _remove_aimv2(module: Any) -> None:
    """Remove a configuration name that transformers uses and vLLM registers again; nothing public removes one."""
    module.CONFIG_MAPPING._mapping.pop("aimv2", None)  # noqa: SLF001


def _name_shared_memory(_module: Any) -> None:
    """Set the name that vLLM sets when it creates the process groups; here MindSpeed-RL creates them."""
    os.environ["VLLM_DIST_IDENT"] = f"coca-{os.environ['MASTER_PORT']}"


#: Preparation for definitions of kind ``use``: the module after whose import it runs, and the function.
_PREPARED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "vllm.transformers_utils.configs.ovis:AIMv2Config": ("transformers.models.auto.configuration_auto", _remove_aimv2),
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": (
        "vllm.distributed.device_communicators.cpu_communicator",
        _name_shared_memory,
    ),
}


def allow_float32(original: Any) -> Any:
    """Wrap ``EngineArgs._is_v1_supported_oracle``: it refuses float32, which GPU attention does not support.

    The other conditions are checked with a copy of the configuration in bfloat16.
    """

    def is_v1_supported(self: Any, model_config: Any) -> bool:
        if model_config.dtype == torch.float32:
            model_config = copy.copy(model_config)
            model_config.dtype = torch.bfloat16
        return bool(original(self, model_config))

    return is_v1_supported


def keep_external_launcher(original: Any) -> Any:
    """Wrap ``CpuPlatform.check_and_update_config``: MindSpeed-RL starts the ranks, and calls it without a model.

    For more than one rank vLLM would replace ``external_launcher`` by an executor that starts processes.
    """

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if vllm_config.model_config is None:
            return
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend
        original.__func__(cls, vllm_config)
        if executor == "external_launcher":
            parallel.distributed_executor_backend = executor

    return classmethod(check_and_update_config)


def inspect_in_process(_original: Any) -> Any:
    """Replace ``_run_in_subprocess``: a subprocess has no wrapped definitions."""

    def run(function: Callable[[], Any]) -> Any:
        return function()

    return run


def bind_no_threads(original: Any) -> Any:
    """Wrap ``CPUWorker.init_device``: bind no threads.

    The list of threads is indexed by the global rank; 0.11.0 indexes it by the rank within a replica.
    """

    def init_device(self: Any) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["all"] * (self.rank + 1))
        parallel = self.parallel_config
        replica, parallel.data_parallel_rank_local = parallel.data_parallel_rank_local, None
        try:
            original(self)
        finally:
            parallel.data_parallel_rank_local = replica

    return init_device


def reset_attn_backend(original: Any) -> Any:
    """Wrap ``GPUModelRunner.initialize_attn_backend``: MindSpeed-RL initialises the cache for every rollout."""

    def initialize_attn_backend(self: Any, kv_cache_config: Any) -> None:
        for name in ("attn_backends", "attn_metadata_builders", "attn_groups"):  # the last in 0.11.0, for the others
            if hasattr(self, name):
                setattr(self, name, [])
        original(self, kv_cache_config)

    return initialize_attn_backend


def plain_linear(_original: Any) -> Any:
    """Replace ``dispatch_cpu_unquantized_gemm``, which packs a copy of the weight and frees the weight.

    The copy would keep the weights from before the first training step.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # vLLM calls it with the layer's weight of that moment

    return dispatch


def fork_cpu_generator(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.generate_sequences``: keep the CPU generator of training's dropout.

    vLLM samples from it here; ranks of one model must draw the same dropout, and may run different engines.
    """

    def generate_sequences(self: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            original(self)

    return generate_sequences
