"""Hooks that take effect only on an NPU, on small stubs."""

from contextlib import contextmanager
from typing import Any

import pytest

from coca_mindspeed.mindspeed.stages.rollout_engine import onload_training_weights, prompts_as_token_ids


class _Sharding:
    """Reads the training weights, then offloads them, as MindSpeed-RL does."""

    def __init__(self, offload, share_backbone=None):
        self.train_param_offload = offload
        if share_backbone is not None:
            self.share_backbone = share_backbone
        self.megatron_offloader = self
        self.there, self.onloaded = True, 0

    def onload_param(self):
        self.there = True
        self.onloaded += 1

    def enter_infer_mode(self):
        if not self.there:
            raise RuntimeError("weights of size zero were read")
        self.there = not self.train_param_offload


def test_a_second_rollout_finds_the_training_weights():
    plain = _Sharding(offload=True)
    plain.enter_infer_mode()
    with pytest.raises(RuntimeError, match="size zero"):
        plain.enter_infer_mode()

    hooked = onload_training_weights(_Sharding.enter_infer_mode)
    sharding = _Sharding(offload=True)
    for _ in range(3):
        hooked(sharding)
    for untouched in (_Sharding(offload=False), _Sharding(offload=True, share_backbone=True)):
        hooked(untouched)
        assert untouched.onloaded == 0


class _Engine:
    """Stub of ``VLLMInferEngine``."""

    def __init__(self):
        self.llm, self.calls = self, list[Any]()
        self.sampling_params = {"n": 1}

    def init_cache_engine(self):
        self.calls.append("init")

    def free_cache_engine(self):
        self.calls.append("free")

    @contextmanager
    def update_sampling_params(self, **changes):
        before = self.sampling_params
        self.sampling_params = before | changes
        yield
        self.sampling_params = before

    def generate(self, **arguments):
        self.calls.append(arguments)
        return "answered"

    def _post_process_outputs(self, outputs):
        return f"tokens of what was {outputs}"


def test_prompts_reach_the_rollout_engine_as_token_ids():
    engine = _Engine()
    sampled = prompts_as_token_ids(None)(engine, [[151644, 8948], [7]], n=2)
    assert sampled == "tokens of what was answered"
    asked = {
        "prompts": [{"prompt_token_ids": [151644, 8948]}, {"prompt_token_ids": [7]}],
        "sampling_params": {"n": 2},
        "use_tqdm": False,
    }
    assert engine.calls == ["init", asked, "free"]
    assert engine.sampling_params == {"n": 1}
