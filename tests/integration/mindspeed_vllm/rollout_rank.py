"""One rank of MindSpeed-RL's actor with its own vLLM, without a Ray cluster: ``python -m ... JOB.json``.

Rolls out before and after a real optimizer step, once with the weights of before, once with a matrix of them permuted,
and several times in a row with and without the hook that seeds rollouts; every rank writes what it found.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tests.integration.mindspeed.engine_rank import build_worker
from tests.integration.mindspeed.tiny import padded
from tests.integration.mindspeed_vllm.models import NEW_TOKENS, ROLLOUTS

GREEDY = {"n": 1, "temperature": 0.0, "max_tokens": NEW_TOKENS}


def main(job):
    # Rank and device come from the environment here, not from a Ray actor's resources.
    ray.get_runtime_context = lambda: SimpleNamespace(get_accelerator_ids=lambda: {"NPU": [os.environ["RANK"]]})
    ray.nodes = lambda: [{"Alive": True}]
    from coca_mindspeed.mindspeed.start.process import setup_driver

    setup_driver()
    worker = build_worker(OmegaConf.create(job["config"]))
    rank = torch.distributed.get_rank()
    rollouts = Rollouts(worker, job["prompts"])

    manager = worker.sharding_manager
    found = {}
    manager.enter_infer_mode()
    found |= rollouts.greedy("before")
    found |= rollouts.in_a_row("hooked")
    found |= rollouts.in_a_row("unhooked", hooked=False)
    found["grad_norm"] = rollouts.optimizer_step()
    found |= rollouts.greedy("not handed over")
    manager.exit_infer_mode()
    manager.enter_infer_mode()
    found |= rollouts.greedy("after")
    manager.exit_infer_mode()
    with query_and_key_swapped():
        manager.enter_infer_mode()
        found |= rollouts.greedy("permuted")
        manager.exit_infer_mode()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, Path(job["output"], f"found{rank}"))
    state = rollouts.trained_weights()
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in state.items()}, Path(job["output"], "trained"))
    torch.distributed.barrier()


class Rollouts:
    """Of one worker, all from the same prompts."""

    def __init__(self, worker, prompts):
        self.worker, self.engine, self.prompts = worker, worker.inference_model, prompts
        self._iteration = 0

    def _generate(self, **changes):
        """Responses ``[prompts * n, tokens]``, and their log-probabilities."""
        from coca_mindspeed.mindspeed.stages.rollout_engine import RolloutCount

        self.engine.coca_rollouts = RolloutCount(run_seed=1, iteration=self._iteration)
        self._iteration += 1
        return self.engine.generate_sequences(self.prompts, **changes)

    def greedy(self, name):
        """Responses padded with the end of text, and their log-probabilities, padded with 0."""
        ids, log_probs = self._generate(**GREEDY)
        log_probs = log_probs * self._inside(ids)  # upstream pads them with a token's id
        width, pad = NEW_TOKENS - ids.shape[1], torch.nn.functional.pad
        eos = self.worker.tokenizer.eod
        return {f"{name}/ids": pad(ids, (0, width), value=eos), f"{name}/log_probs": pad(log_probs, (0, width))}

    def _inside(self, ids):
        """Which tokens are of a response, its end of text included."""
        ended = (ids == self.worker.tokenizer.eod).int()
        return ended.cumsum(1) - ended == 0

    def in_a_row(self, name, hooked=True):
        """First tokens of several rollouts, ``[rollouts, prompts * n]``."""
        owner = type(self.engine)
        wrapped = owner.init_cache_engine
        if not hooked:
            owner.init_cache_engine = wrapped.__wrapped__
        drawn = [self._generate(n=8, temperature=1.0, max_tokens=2)[0][:, 0] for _ in range(ROLLOUTS)]
        owner.init_cache_engine = wrapped
        return {f"{name}/first": torch.stack(drawn)}

    def optimizer_step(self):
        """MindSpeed-RL's own update by sampled responses and arbitrary advantages; returns the gradient's norm."""
        from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SEGMENT_ENDS

        engine = self.worker.actor_hybrid.train_actor
        ids, log_probs = self._generate(n=4, temperature=1.0, max_tokens=NEW_TOKENS)
        parallel = self.worker.parallel_state
        shared = [ids, log_probs]  # ranks that hold one model between them train by the same rows
        group = parallel.get_model_parallel_group()
        first = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(shared, src=first, group=group)
        ids, log_probs = shared
        eos = self.worker.tokenizer.eod
        inside = self._inside(ids)
        lengths = inside.sum(1)
        prompts = [torch.tensor(prompt) for prompt in self.prompts for _ in range(4)]
        rows = zip(prompts, ids, lengths.tolist(), strict=True)
        signs = torch.where(torch.arange(len(ids)) % 2 == 0, 1.0, -1.0)
        batch = {
            "input_ids": padded([torch.cat([prompt, row[:n]]) for prompt, row, n in rows], eos),
            "responses": ids,
            "prompt_length": torch.tensor([[len(prompt)] for prompt in prompts], dtype=torch.int32),
            "response_length": lengths[:, None].int(),
            "advantages": signs[:, None] * inside,
            "old_log_prob": log_probs * inside,
            SEGMENT_ENDS: torch.stack([torch.ones_like(lengths), lengths], dim=1).int(),
            ROLLOUT_LOG_PROBS: log_probs * inside,
        }
        metrics = engine.update(batch, SimpleNamespace(value=0.0))
        return torch.tensor(float(metrics["actor/grad_norm"][0]))

    def trained_weights(self):
        """The weights as they are in training, by Hugging Face's names; collective."""
        from tests.support.mindspeed_host.weights import Layout, local_shard

        parallel = self.worker.parallel_state
        layout = Layout.of(self.engine.hf_config, parallel.get_tensor_model_parallel_world_size())
        group = parallel.get_model_parallel_group()
        shards = [None] * torch.distributed.get_world_size(group)
        mine = local_shard(self.worker.model, parallel.get_tensor_model_parallel_rank())
        torch.distributed.all_gather_object(shards, mine, group=group)
        return layout.join(shards)


class query_and_key_swapped:  # noqa: N801  used as a function
    """While it lasts, vLLM is handed queries for keys in every matrix that holds both."""

    def __enter__(self):
        from mindspeed_rl.models.rollout.vllm_adapter import megatron_weight_loaders as loaders

        self._loaders, self._original = loaders, loaders.qkv_split_weight

        def swapped(*args):
            query, key, value = self._original(*args)
            return torch.cat([query[len(key) :], key]), query[: len(key)], value

        loaders.qkv_split_weight = swapped

    def __exit__(self, *_exception):
        self._loaders.qkv_split_weight = self._original


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive the barrier
