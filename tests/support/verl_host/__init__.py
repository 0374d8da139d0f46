"""CPU shim of verl, for tests and ``launch/verl.sh --smoke``: a CPU platform, and rollout by transformers.

Loaded by ``VERL_USE_EXTERNAL_MODULES`` with ``VERL_PLATFORM=cpu`` and ``rollout.name=host``.  verl, Ray, TransferQueue,
the reward loop, FSDP2 and the weight sync are the real ones; the rollout engine is replaced, and the replay buffer
polls more often.
"""

from typing import Any

from coca_mindspeed.utils.packages import after_import
from tests.support.verl_host.cpu_platform import CpuPlatform

ROLLOUT = "host"
_POLL_SECONDS = 0.05  # verl's two seconds would be most of a step here


def _register_platform(registry: Any) -> None:
    registry.PlatformRegistry.register("cpu")(CpuPlatform)


def _register_replica(module: Any) -> None:
    def load() -> Any:
        from tests.support.verl_host.replica import HostReplica

        return HostReplica

    module.RolloutReplicaRegistry.register(ROLLOUT, load)


def _register_adapter(module: Any) -> None:
    # verl has no function that registers one.
    module._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "tests.support.verl_host.replica.HostAdapter"  # noqa: SLF001


def _register_engine(module: Any) -> None:
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(module.FSDPEngineWithLMHead)


def _poll_often(module: Any) -> None:
    original = module.ReplayBuffer.__init__

    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{"poll_interval": _POLL_SECONDS, **options})

    module.ReplayBuffer.__init__ = construct


def _name_each_device_once(distributed: Any) -> None:
    """Verl requests a backend for the CPU and one for the device; PyTorch refuses the CPU twice."""
    original = distributed.init_process_group

    def init_process_group(backend: Any = None, *others: Any, **options: Any) -> Any:
        return original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *others, **options)

    distributed.init_process_group = init_process_group


after_import("verl.plugin.platform.platform_manager", _register_platform)
after_import("verl.workers.rollout.replica", _register_replica)
after_import("verl.workers.rollout.base", _register_adapter)
after_import("verl.workers.engine.fsdp.transformer_impl", _register_engine)
after_import("verl.trainer.ppo.v1.replay_buffer", _poll_often)
after_import("torch.distributed", _name_each_device_once)
