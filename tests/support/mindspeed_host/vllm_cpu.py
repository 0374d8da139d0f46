"""vLLM's build for CPUs where MindSpeed-RL expects vLLM-Ascend: what it wants of its platform, supplied while it runs.

MindSpeed-RL's own ``VLLMInferEngine`` and ``MegatronShardingManager`` then sample and hand over weights.  No source of
vLLM is edited: ``patches/vllm_*.yaml`` lists what is wrapped, and nothing is unless it is the source that was read.
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
from coca_mindspeed.mindspeed.start.releases import STACKS
from coca_mindspeed.upstream.after_import import after_import
from coca_mindspeed.upstream.manifest import Hook, Manifest, load_manifests, matching_manifest

_VARIABLES = {
    "VLLM_USE_V1": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # MindSpeed-RL reaches into an engine in its own process
    "TORCHDYNAMO_DISABLE": "1",
}

_installed = False


def known_vllm(release: str) -> Manifest:
    """The manifest of the vLLM that is installed here, which is not imported.

    Args:
        release: of MindSpeed-RL.

    Raises:
        MissingDependencyError: there is none, or this release of MindSpeed-RL wants one that we cannot run on a CPU.
        ManifestError: a definition differs from the vLLM that is known.
    """
    pin = STACKS[release].packages["vllm"]
    manifests = [manifest for manifest in load_manifests(package="vllm") if manifest.release == pin]
    if not manifests:
        raise MissingDependencyError(
            f"coca.rollout: vllm needs vLLM {pin} beside MindSpeed-RL {release}, whose build for CPUs we do not know; "
            "take coca.rollout: transformers (docs/port.md)"
        )
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"coca.rollout: vllm on platform host needs vLLM {pin}, its build for CPUs, and found none; run in the "
            f"environment that requirements/mindspeed-vllm.sh DIRECTORY {pin} makes, or take "
            "coca.rollout: transformers (docs/port.md)"
        )
    return matching_manifest(Path(spec.origin).parents[1], manifests, package="vllm")


def install(release: str) -> None:
    """Prepare this process, before anything imports vLLM and before device names change their meaning.  Idempotent."""
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


def seed_like_a_device() -> None:
    """Let the device's seed be the CPU's, from whose generator vLLM samples here."""
    torch.npu.manual_seed = torch.manual_seed  # type: ignore[attr-defined]


def _wrap(hooks: list[Hook], module: Any) -> None:
    for hook in hooks:
        owner = module
        *path, name = hook.target.partition(":")[2].split(".")
        for part in path:
            owner = getattr(owner, part)
        ours, _, wrapper = str(hook.replacement).partition(":")
        setattr(owner, name, getattr(importlib.import_module(ours), wrapper)(vars(owner)[name]))


def _without_aimv2(module: Any) -> None:
    """VLLM registers a configuration of its own by a name that transformers has taken since."""
    module.CONFIG_MAPPING._mapping.pop("aimv2", None)


def _name_shared_memory(_module: Any) -> None:
    """VLLM would name it itself, had it made the groups and not MindSpeed-RL."""
    os.environ["VLLM_DIST_IDENT"] = f"coca-{os.environ['MASTER_PORT']}"


#: What a definition that is only leaned on has to find: behind which import, and by what.
_PREPARED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "vllm.transformers_utils.configs.ovis:AIMv2Config": (
        "transformers.models.auto.configuration_auto",
        _without_aimv2,
    ),
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": (
        "vllm.distributed.device_communicators.cpu_communicator",
        _name_shared_memory,
    ),
}


def float32_in_v1(original: Any) -> Any:
    """Wrap ``EngineArgs._is_v1_supported_oracle``: it refuses float32 for the sake of a GPU's attention.

    All its other questions are asked, of a copy of the configuration that says bfloat16.
    """

    def is_v1_supported(self: Any, model_config: Any) -> bool:
        if model_config.dtype == torch.float32:
            model_config = copy.copy(model_config)
            model_config.dtype = torch.bfloat16
        return bool(original(self, model_config))

    return is_v1_supported


def in_a_process_of_mindspeed_rl(original: Any) -> Any:
    """Wrap ``CpuPlatform.check_and_update_config``: MindSpeed-RL starts the ranks, and asks before there is a model.

    For more than one rank it would put an executor that starts processes in the place of ``external_launcher``.
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


def in_this_process(_original: Any) -> Any:
    """Stand where ``_run_in_subprocess`` would, which looks at a model's class where nothing is wrapped."""

    def run(function: Callable[[], Any]) -> Any:
        return function()

    return run


def without_binding_threads(original: Any) -> Any:
    """Wrap ``CPUWorker.init_device``: it looks up the threads to bind by its rank among all that MindSpeed-RL started.

    0.11.0 would look among those of its replica of the model only.
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


def once_more(original: Any) -> Any:
    """Wrap ``GPUModelRunner.initialize_attn_backend``: MindSpeed-RL initialises the cache anew for every rollout."""

    def initialize_attn_backend(self: Any, kv_cache_config: Any) -> None:
        for name in ("attn_backends", "attn_metadata_builders", "attn_groups"):  # the last in 0.11.0, for the others
            if hasattr(self, name):
                setattr(self, name, [])
        original(self, kv_cache_config)

    return initialize_attn_backend


def by_the_weight_itself(_original: Any) -> Any:
    """Stand where ``dispatch_cpu_unquantized_gemm`` would, which packs a copy of the weight and lets go of the weight.

    The copy would be of the weights of before the first training step, and nothing could be handed over any more.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # vLLM calls it with the layer's weight of that moment

    return dispatch


def beside_the_generator_of_training(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.generate_sequences``: here vLLM samples from the generator of training's dropout.

    Ranks that hold a model between them have to draw that alike, and may be engines of their own.
    """

    def generate_sequences(self: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            original(self)

    return generate_sequences
