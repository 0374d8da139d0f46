"""Without a KL term there is no reference worker group, whoever asks for one."""

from types import SimpleNamespace
from typing import Any

import pytest

from coca_mindspeed.mindspeed import reference
from coca_mindspeed.mindspeed.reference import NoReference, worker_groups


class _Group:
    """MindSpeed-RL's ``RayActorGroup`` takes more, and starts processes."""

    def __init__(self, worker: Any, placement_group: Any = None, megatron_config: Any = None) -> None:
        self.worker, self.megatron_config = worker, megatron_config


def _worker(name: str) -> Any:
    return SimpleNamespace(__ray_actor_class__=type(name, (), {}))


@pytest.fixture(params=[False, True])
def with_reference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(reference, "process_settings", lambda: SimpleNamespace(reference=request.param))
    return bool(request.param)


def test_only_the_reference_group_is_left_out(with_reference: bool) -> None:
    groups = worker_groups(_Group)
    actor = groups(worker=_worker("ActorHybridWorker"), placement_group=None, megatron_config=1)
    assert isinstance(actor, _Group)
    assert actor.megatron_config == 1
    group = groups(worker=_worker("ReferenceWorker"), placement_group=None, megatron_config=2)
    assert isinstance(group, _Group) == with_reference
    assert group.megatron_config == 2


def test_no_reference_does_what_the_trainer_asks() -> None:
    nothing = NoReference("config")
    assert nothing.initialize() is nothing
    nothing.sync_init_transfer_dock("dock", None)
    nothing.compute_ref_log_prob(blocking=True)
    nothing.wait_all_ref_objs_run_over()
    assert nothing.megatron_config == "config"
