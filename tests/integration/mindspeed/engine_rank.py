"""One rank of MindSpeed-RL's training engine, without a Ray cluster: what the gradient tests start as a process.

``python -m tests.integration.mindspeed.engine_rank JOB.json`` with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` set.  It builds the real actor worker (hooked, on the host platform), has it sample and compute
log-probabilities, runs forward and backward on given batches, and writes what it found from rank 0.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from tests.integration.mindspeed.tiny import padded
from tests.support.collectives import RecordCollectives


def main(job):
    # Rank and device come from the environment here, not from a Ray actor's resources.
    ray.get_runtime_context = lambda: SimpleNamespace(get_accelerator_ids=lambda: {"NPU": ["0"]})
    ray.nodes = lambda: [{"Alive": True}]
    from coca_mindspeed.mindspeed.start.process import setup_driver

    setup_driver()
    worker = build_worker(OmegaConf.create(job["config"]))
    engine = worker.actor_hybrid.train_actor
    if job["offload"]:
        offload_and_load(worker, engine)
    found = {}
    calls = {}
    for name, path in job["batches"].items():
        gradient, calls[name] = gradient_of(worker, engine, load_file(path))
        found |= {f"{name}/{key}": value for key, value in gradient.items()}
    Path(f"{job['output']}.calls.{torch.distributed.get_rank()}.json").write_text(json.dumps(calls))
    if job.get("prompts"):
        found |= rollout_and_log_probs(worker, engine, job["prompts"])
    found["reference_models"] = torch.tensor(count_reference_models(worker))
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # the last pipeline stage
        save_file({key: value.contiguous() for key, value in found.items()}, job["output"])
    torch.distributed.barrier()


def build_worker(config):
    train_grpo = importlib.import_module("cli.train_grpo")
    from coca_mindspeed.mindspeed.stages.actor_worker import ActorWithoutReference

    parsed = train_grpo.parse_training_config(config)
    actor = parsed["actor_config"]
    worker = ActorWithoutReference(
        actor,
        parsed["rl_config"],
        parsed["generate_config"],
        model_provider=train_grpo.gpt_model_provider,
        initialize_func=train_grpo.initialize_megatron,
        tokenizer=train_grpo.get_tokenizer(tokenizer_model=actor.tokenizer_name_or_path),
        get_megatron_module=train_grpo.get_megatron_module,
        profiler_config=parsed["profiler_config"]["integrated"],
        msprobe_config=parsed["msprobe_config"],
        global_batch_size=actor.global_batch_size * parsed["rl_config"].n_samples_per_prompt,
    )
    worker.initialize()
    return worker


def offload_and_load(worker, engine):
    """Move gradients, parameters and optimizer state out and in again by MindSpeed-RL's own off-loader.

    The worker's is replaced on a CPU, where nothing has to move; the storages are emptied and filled all the same.
    """
    from megatron.core.optimizer import DistributedOptimizer
    from mindspeed.op_builder import AlgorithmOpBuilder
    from mindspeed_rl.workers.resharding.megatron_off_loader import MegatronOffLoader

    # Compiled against CANN, and called with reuse_fp32_param only.
    AlgorithmOpBuilder.load = lambda _: SimpleNamespace(reuse_data_ptr=None)
    loader = MegatronOffLoader(
        megatron_model=engine.model,
        optimizer=worker.optimizer,
        megatron_config=worker.megatron_config,
        distributed_optimizer=DistributedOptimizer,
    )
    buffers = [buffer for chunk in engine.model for buffer in chunk.buffers]
    loader.offload_grad()
    loader.offload_optimizer()
    loader.offload_param()
    assert buffers
    for buffer in buffers:
        assert buffer.grad_data.untyped_storage().size() == buffer.param_data.untyped_storage().size() == 0
    loader.onload_param()
    loader.onload_optimizer()
    loader.onload_grad()


def gradient_of(worker, engine, batch):
    """The gradient of one mini-batch in Hugging Face's names, joined over ranks, and this rank's collectives.

    Nothing is updated.
    """
    from tests.support.mindspeed_host.weights import Layout, Shard, named_parameters

    parallel = worker.parallel_state
    share = len(batch["responses"]) // parallel.get_data_parallel_world_size()
    rank = parallel.get_data_parallel_rank()
    mine = {name: rows[rank * share : (rank + 1) * share].clone() for name, rows in batch.items()}
    engine.kl_ctrl = SimpleNamespace(value=0.0)
    for chunk in engine.model:
        chunk.train()
        chunk.zero_grad_buffer()
    with RecordCollectives() as record:
        statistics = engine._forward_backward_batch(mine)  # noqa: SLF001  upstream's update without an optimizer step
    gradients = {name: parameter.main_grad.clone() for name, parameter in named_parameters(engine.model)}
    shard = Shard(parallel.get_tensor_model_parallel_rank(), gradients)
    shards = [None] * torch.distributed.get_world_size(parallel.get_model_parallel_group())
    torch.distributed.all_gather_object(shards, shard, group=parallel.get_model_parallel_group())
    layout = Layout.of(worker.inference_model.hf_config, parallel.get_tensor_model_parallel_world_size())
    joined = layout.join(shards)
    joined.pop("lm_head.weight", None)
    losses = torch.tensor([row["actor/pg_loss"] for row in statistics] or [float("nan")])
    return {**joined, "loss": losses.mean()}, record.calls


def rollout_and_log_probs(worker, engine, prompts):
    """Sample from the current weights, and compute the samples' log-probabilities by the training engine."""
    from coca_mindspeed.mindspeed.stages.rollout_engine import RolloutCount

    worker.inference_model.coca_rollouts = RolloutCount(run_seed=1, iteration=0)  # as the hooked worker would tell it
    worker.sharding_manager.enter_infer_mode()
    ids, rollout = worker.inference_model.generate_sequences(prompts, n=2)
    world = torch.distributed.get_world_size()
    # Every rank samples its own; all of them judge those of rank 0.
    shared = [ids, rollout]
    torch.distributed.broadcast_object_list(shared, src=0)
    ids, rollout = shared
    rows = [prompt for prompt in prompts for _ in range(2)]
    eos = worker.tokenizer.eod
    lengths = [int((row == eos).nonzero()[0]) + 1 if (row == eos).any() else len(row) for row in ids]
    inputs = [torch.cat([torch.tensor(p), row[:n]]) for p, row, n in zip(rows, ids, lengths, strict=True)]
    batch = {
        "input_ids": padded(inputs, eos),
        "responses": ids,
        "prompt_length": torch.tensor([[len(p)] for p in rows]),
        "response_length": torch.tensor([[n] for n in lengths]),
    }
    log_probs, _ = engine.compute_log_prob(batch)
    if not worker.parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    inside = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    gap = (torch.cat(log_probs)[:, : ids.shape[1]].float() - rollout).abs()[inside]
    return {"rollout_gap": gap.max(), "rollout_tokens": inside.sum(), "world": torch.tensor(world)}


def count_reference_models(worker):
    """How many attributes of the worker hold a reference model."""
    return sum(getattr(worker, name, None) is not None for name in ("reference", "ref_model", "ref_manager"))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive the barrier
