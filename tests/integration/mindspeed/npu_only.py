"""What hooks for NPUs alone do to the real classes, in a process of its own: ``python -m ...npu_only HOME``.

vLLM is stood in for, so this shows that upstream's code does what our hooks correct, and that it no longer does so when
hooked; it shows nothing about an NPU.
"""

import contextlib
import importlib
import os
import sys
from types import SimpleNamespace

from coca_mindspeed.mindspeed.stages.rollout_engine import (
    RolloutCount,
    onload_training_weights,
    prompts_as_token_ids,
    seed_rollout,
)
from tests.support import mindspeed_host


class _Weights:
    """An offloader and a weight container in one: reading what was offloaded is an error."""

    weight_buffers = ()

    def __init__(self):
        self.there = True

    def onload_param(self):
        self.there = True

    def offload_param(self):
        self.there = False

    def get_infer_params(self):
        if not self.there:
            raise RuntimeError("offloaded weights were read")

    def sync_model_weights(self, *_args, **_kwargs): ...

    offload_model_weights = sync_model_weights


def rollouts_in_a_row():
    from mindspeed_rl.workers.resharding.megatron_sharding_manager import MegatronShardingManager

    original = MegatronShardingManager.enter_infer_mode
    for enter, fails in ((original, True), (onload_training_weights(original), False)):
        manager = object.__new__(MegatronShardingManager)
        weights = _Weights()
        manager.train_param_offload = True
        manager.vllm_weight_container = manager.megatron_offloader = manager.inference_engine = weights
        enter(manager)
        manager.exit_infer_mode()
        try:
            enter(manager)
        except RuntimeError:
            assert fails, "the hook does not bring the weights back"
        else:
            assert not fails, "upstream brings the weights back itself: the hook can go"


class _Engine:
    """What ``generate_sequences`` touches of an engine, and a tokenizer that has one special token."""

    sampling_params = None

    def __init__(self):
        self.llm = self.tokenizer = self
        self.asked = {}

    @property
    def seen(self):
        """The prompts, as token ids or as text."""
        ids = self.asked.get("prompt_token_ids")
        return ids or [p["prompt_token_ids"] if isinstance(p, dict) else p for p in self.asked["prompts"]]

    def init_cache_engine(self): ...

    free_cache_engine = init_cache_engine

    @contextlib.contextmanager
    def update_sampling_params(self, **_changes):
        yield

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if not (skip_special_tokens and token > 100))

    def generate(self, **asked):
        self.asked = asked

    def _post_process_outputs(self, _outputs): ...


def special_tokens(release):
    from mindspeed_rl.models.rollout import vllm_engine
    from mindspeed_rl.utils import utils

    vllm_engine.is_multimodal = utils.is_multimodal = lambda: False
    original = vllm_engine.VLLMInferEngine.generate_sequences
    prompts = [[151644, 1], [2, 3]]
    upstream, hooked = _Engine(), _Engine()
    original(upstream, prompts, n=2)
    prompts_as_token_ids(original)(hooked, prompts, n=2)
    assert hooked.seen == prompts
    if release == "master":
        assert upstream.seen == ["1", "2 3"], "upstream keeps the special tokens now: the hook can go"
    else:
        assert upstream.seen == prompts, "upstream no longer hands over token ids: it needs the hook of master"


def noise():
    """The real ``init_cache_engine`` over an executor that seeds as vLLM-Ascend's workers do at the end of it."""
    import torch
    from mindspeed_rl.models.rollout.vllm_engine import VLLMInferEngine

    parallel_state = importlib.import_module("vllm.distributed.parallel_state")
    os.environ["VLLM_USE_V1"] = "1"
    parallel_state.get_tp_group = lambda: SimpleNamespace(first_rank=0)
    torch.npu.manual_seed = torch.manual_seed  # the CPU's generator stands for the device's
    executor = SimpleNamespace(initialize_from_config=lambda _configs: torch.manual_seed(0))
    executor.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[])))
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor, kv_cache_configs=None))
    llm_engine = SimpleNamespace(model_executor=executor, engine_core=core, reset_prefix_cache=lambda: None)
    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=llm_engine), coca_rollouts=RolloutCount(1, 0))

    def draw(init):
        init(engine)
        return float(torch.rand(()))

    original = VLLMInferEngine.init_cache_engine
    assert draw(original) == draw(original), "upstream no longer seeds every rollout alike: the hook can go"
    hooked = seed_rollout(original)
    assert len({draw(original), *(draw(hooked) for _ in range(8))}) == 9


if __name__ == "__main__":
    mindspeed_host.install()
    rollouts_in_a_row()
    special_tokens(sys.argv[1])
    noise()
