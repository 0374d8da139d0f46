"""Rollout seeds, with stubs that seed themselves as vLLM does: no two rollouts of a run may draw the same numbers."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.stages.rollout_engine import count_rollouts, rollout_seed, seed_rollout


class _Engine:
    """Stub of ``VLLMInferEngine``: initialising its cache seeds torch with 0."""

    def __init__(self, init):
        self._init = init

    def init_cache_engine(self):
        self._init(self)

    def generate_sequences(self):
        self.init_cache_engine()
        return torch.empty(4).exponential_(generator=_DEVICE).tolist()


_DEVICE = torch.Generator()  # stands for the generator of an NPU


def _vllm_seeds(_engine):
    torch.manual_seed(0)
    _DEVICE.manual_seed(0)


class _Worker:
    """One rank: ``dispatches`` rollouts an iteration."""

    def __init__(self, init=_vllm_seeds, seed=1, iteration=0):
        self.iteration, self.megatron_config = iteration, SimpleNamespace(seed=seed)
        self.actor_hybrid = SimpleNamespace(inference_actor=_Engine(init))
        self.drawn: list[tuple[float, ...]] = []

    def generate_sequences(self, dispatches=2):
        for _ in range(dispatches):
            self.drawn.append(tuple(self.actor_hybrid.inference_actor.generate_sequences()))


def _run(worker, iterations):
    generate = count_rollouts(_Worker.generate_sequences)
    for _ in range(iterations):
        generate(worker)
        worker.iteration += 1
    return worker.drawn


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
        worker = _Worker(seed_rollout(_vllm_seeds))
        count_rollouts(_Worker.generate_sequences)(worker)  # a validation
        drawn += _run(worker, iterations=4)
        shuffled.add(tuple(torch.randperm(100).tolist()))
    assert len(set(drawn)) == len(drawn) == 3 * (4 + 1) * 2
    assert len(shuffled) == 1
    with pytest.raises(TrainingError, match="iteration"):
        _Engine(seed_rollout(_vllm_seeds)).generate_sequences()


def test_ranks_of_one_engine_draw_alike_and_a_resumed_run_as_if_it_had_not_stopped(first_rank):
    first_rank(2)
    hooked = seed_rollout(_vllm_seeds)
    whole = _run(_Worker(hooked), iterations=4)
    assert _run(_Worker(hooked), iterations=4) == whole
    assert _run(_Worker(hooked, iteration=2), iterations=2) == whole[4:]
    assert not set(_run(_Worker(hooked, seed=2), iterations=4)) & set(whole)


def test_seeds_are_in_numpys_range_and_distinct():
    seeds = {rollout_seed(1, iteration, dispatch, 0) for iteration in range(100) for dispatch in range(16)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert rollout_seed(1, 2, 3, 4) != rollout_seed(1, 2, 4, 3)
