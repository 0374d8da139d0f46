"""Where a reference worker would stand when there is no KL term: it does nothing, and takes no memory."""

from typing import Any

from coca_mindspeed.mindspeed.start.process import process_settings


class NoReference:
    """The methods that MindSpeed-RL's trainer calls on its reference worker group."""

    def __init__(self, megatron_config: Any) -> None:
        self.megatron_config = megatron_config

    def sync_init_transfer_dock(self, *_docks: Any) -> None:
        """There is nothing to read or write."""

    def compute_ref_log_prob(self, blocking: bool = False) -> None:
        """There is no reference to compare with."""

    def wait_all_ref_objs_run_over(self) -> None:
        """Nothing was started."""

    def initialize(self) -> "NoReference":
        """Nothing is built."""
        return self


def worker_groups(original: Any) -> Any:
    """For the manifest: MindSpeed-RL's ``RayActorGroup`` as ``train`` uses it, without a group of reference workers.

    A subclass, because the trainer tells worker groups from other reward workers by this class.  It also completes
    separate-worker mode: ``train`` gives that mode's actors no profiler and no msprobe settings, which they read.
    """

    class WorkerGroup(original):
        def __new__(cls, worker: Any = None, *_args: Any, megatron_config: Any = None, **_kwargs: Any) -> Any:
            if _is_reference(worker) and not process_settings().reference:
                return NoReference(megatron_config)
            return super().__new__(cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**_switched_off(), **kwargs})

        def get_consumed_train_samples(self) -> int:
            """Prompts of the finished iterations, so that a resumed run goes on behind them.

            MindSpeed-RL's workers add a whole iteration's for every dispatch of an update.
            """
            return int(self.get_iteration() * self.megatron_config.global_batch_size)

    return WorkerGroup


def _switched_off() -> dict[str, Any]:
    """Settings under which MindSpeed-RL neither profiles nor probes."""
    from mindspeed_rl.config_cls.mindstudio_config import MsprobeConfig, ProfilerConfig

    role = "integrated"  # what train itself calls it
    return {"profiler_config": ProfilerConfig({}, role=role), "msprobe_config": MsprobeConfig({}, role=role)}


def _is_reference(worker: Any) -> bool:
    return getattr(getattr(worker, "__ray_actor_class__", None), "__name__", "") == "ReferenceWorker"
