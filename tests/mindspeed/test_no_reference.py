"""Without a KL term there is no reference worker group."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from coca_mindspeed.mindspeed.stages import trainer as reference
from coca_mindspeed.mindspeed.stages.trainer import NoReference, without_reference_workers


class _Group:
    """Stub of MindSpeed-RL's ``RayActorGroup``."""

    def __init__(self, worker, megatron_config, profiler_config=None, msprobe_config=None):
        self.worker, self.megatron_config = worker, megatron_config
        self.tools = (profiler_config, msprobe_config)

    def get_iteration(self):
        return 50


def _worker(name):
    return SimpleNamespace(__ray_actor_class__=type(name, (), {}))


@pytest.fixture(params=[False, True])
def with_reference(request, monkeypatch):
    monkeypatch.setattr(reference, "process_settings", lambda: SimpleNamespace(reference=request.param))
    return bool(request.param)


@pytest.fixture(autouse=True)
def _mindstudio(monkeypatch):
    module = ModuleType("mindspeed_rl.config_cls.mindstudio_config")
    for name in ("ProfilerConfig", "MsprobeConfig"):
        setattr(module, name, lambda values, role, name=name: (name, values, role))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_only_the_reference_group_is_left_out(with_reference):
    groups = without_reference_workers(_Group)
    actor = groups(worker=_worker("ActorHybridWorker"), megatron_config=1)
    assert isinstance(actor, _Group)
    assert actor.megatron_config == 1
    group = groups(worker=_worker("ReferenceWorker"), megatron_config=2)
    assert isinstance(group, _Group) == with_reference
    assert group.megatron_config == 2
    nothing = NoReference("config")
    assert nothing.initialize() is nothing
    nothing.sync_init_transfer_dock("dock", None)
    nothing.compute_ref_log_prob(blocking=True)
    nothing.wait_all_ref_objs_run_over()


def test_actors_that_are_given_no_profiler_get_one_that_is_off():
    groups = without_reference_workers(_Group)
    assert groups(worker=_worker("ActorHybridWorker"), megatron_config=1).tools == (
        ("ProfilerConfig", {}, "integrated"),
        ("MsprobeConfig", {}, "integrated"),
    )
    config = SimpleNamespace(global_batch_size=8)  # a resumed run continues behind its finished iterations
    assert groups(worker=_worker("ActorHybridWorker"), megatron_config=config).get_consumed_train_samples() == 50 * 8
    given = groups(worker=_worker("IntegratedWorker"), megatron_config=1, profiler_config="p", msprobe_config="m")
    assert given.tools == ("p", "m")
