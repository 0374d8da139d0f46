"""Training without reference workers, for runs without a KL term."""

from typing import Any

from coca_mindspeed.mindspeed.start.process import process_settings

_Upstream: Any = object  # the class of MindSpeed-RL is the next base


class NoReference:
    """The methods that MindSpeed-RL's trainer calls on its reference worker group; they do nothing."""

    def __init__(self, megatron_config: Any) -> None:
        self.megatron_config = megatron_config

    def sync_init_transfer_dock(self, *_docks: Any) -> None: ...

    def compute_ref_log_prob(self, blocking: bool = False) -> None: ...

    def wait_all_ref_objs_run_over(self) -> None: ...

    def initialize(self) -> "NoReference":
        return self


class WorkerGroup(_Upstream):
    """A worker group without reference workers where the run has no reference.

    A subclass, because the trainer tells worker groups from other reward workers by this class.  It also completes
    separate-worker mode, whose actors read profiler and msprobe settings that ``train`` does not pass.
    """

    def __new__(cls, worker: Any = None, *_args: Any, megatron_config: Any = None, **_kwargs: Any) -> Any:
        name = getattr(getattr(worker, "__ray_actor_class__", None), "__name__", "")
        if name == "ReferenceWorker" and not process_settings().reference:
            return NoReference(megatron_config)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from mindspeed_rl.config_cls.mindstudio_config import MsprobeConfig, ProfilerConfig

        role = "integrated"  # as in train itself
        off = {"profiler_config": ProfilerConfig({}, role=role), "msprobe_config": MsprobeConfig({}, role=role)}
        super().__init__(*args, **{**off, **kwargs})

    def get_consumed_train_samples(self) -> int:
        """Prompts of the finished iterations, where a resumed run continues.

        MindSpeed-RL's workers count a whole iteration for every dispatch of an update.
        """
        return int(self.get_iteration() * self.megatron_config.global_batch_size)


def without_reference_workers(original: Any) -> Any:
    """Replace ``RayActorGroup`` as ``train`` uses it."""
    return type("WorkerGroup", (WorkerGroup, original), {})
