"""Rollout seeds, with stubs that seed themselves as vLLM does: no two rollouts of a run may draw the same numbers."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.stages.rollout_engine import count_rollouts, rollout_seed, seed_rollout

_DEVICE = torch.Generator()  # stands for the generator of an NPU


@seed_rollout
def init_cache(_engine):
    """The start of a rollout, hooked; vLLM's seeds everything with 0."""
    torch.manual_seed(0)
    _DEVICE.manual_seed(0)


class Worker:
    """One rank, with two rollouts an iteration."""

    def __init__(self, seed=1, iteration=0):
        self.iteration, self.megatron_config = iteration, SimpleNamespace(seed=seed)
        self.actor_hybrid = SimpleNamespace(inference_actor=SimpleNamespace())
        self.drawn: list[tuple[float, ...]] = []

    @count_rollouts
    def generate_sequences(self):
        for _ in range(2):
            init_cache(self.actor_hybrid.inference_actor)
            self.drawn.append(tuple(torch.empty(4).exponential_(generator=_DEVICE).tolist()))

    def run(self, iterations):
        for _ in range(iterations):
            self.generate_sequences()
            self.iteration += 1
        return self.drawn


@pytest.fixture
def first_rank(monkeypatch):
    """Stub of vLLM; sets the first rank of the engine."""
    group = SimpleNamespace(first_rank=0)
    state = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: group  # type: ignore[attr-defined]
    for module in (ModuleType("vllm"), ModuleType("vllm.distributed"), state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(manual_seed=_DEVICE.manual_seed), raising=False)
    before = torch.get_rng_state()
    yield lambda rank: setattr(group, "first_rank", rank)
    torch.set_rng_state(before)


def test_no_two_rollouts_of_a_run_draw_alike(first_rank):
    """Nor a validation and the iteration after it; the CPU's generator, of training, is the same on all ranks."""
    drawn, shuffled = [], set()
    for engine in (0, 2, 4):
        first_rank(engine)
        worker = Worker()
        worker.generate_sequences()  # a validation
        drawn += worker.run(4)
        shuffled.add(tuple(torch.randperm(100).tolist()))
    assert len(set(drawn)) == len(drawn) == 3 * (4 + 1) * 2
    assert len(shuffled) == 1
    with pytest.raises(TrainingError, match="iteration"):
        init_cache(SimpleNamespace())


def test_ranks_of_one_engine_draw_alike_and_a_resumed_run_as_if_it_had_not_stopped(first_rank):
    first_rank(2)
    whole = Worker().run(4)
    assert Worker().run(4) == whole
    assert Worker(iteration=2).run(2) == whole[4:]
    assert not set(Worker(seed=2).run(4)) & set(whole)


def test_seeds_are_in_numpys_range_and_distinct():
    seeds = {rollout_seed(1, iteration, dispatch, 0) for iteration in range(100) for dispatch in range(16)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert rollout_seed(1, 2, 3, 4) != rollout_seed(1, 2, 4, 3)
