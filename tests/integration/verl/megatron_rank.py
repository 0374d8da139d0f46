"""One rank of verl's Megatron engine on gloo: ``python -m tests.integration.verl.megatron_rank JOB.pt``.

Real: verl's ``forward_backward_batch`` with its microbatches, log-probs over a vocabulary-parallel head and scaling of
the loss, Megatron-Core's pipeline schedules and communication, and the plugin's loss.  Replaced: the transformer, by
an embedding and an output layer, and Megatron-Core's CUDA device, by the CPU.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch


def main(path):
    job = torch.load(path, weights_only=False)
    use_the_cpu()
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(job["tp"], job["pp"])
    engine, model = build_engine(job)
    data = batch_of(job, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    from coca_mindspeed.algorithm.methods import method_settings
    from coca_mindspeed.verl.segment_loss import SegmentLoss

    found = engine.forward_backward_batch(data, SegmentLoss(method_settings(loss_aggregation=job["aggregation"])))
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_reduce(gradient, group=group)
        gradients[name] = gradient / torch.distributed.get_world_size(group)  # as Megatron's DDP averages
    ranks = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    metrics = {name: value.aggregate() for name, value in found.get("metrics", {}).items()}
    torch.save((*ranks, gradients, metrics), f"{path}.{torch.distributed.get_rank()}")
    torch.distributed.barrier()


def use_the_cpu():
    """Megatron-Core creates its communication buffers and counters on CUDA's current device."""
    zeros = torch.zeros

    def on_the_cpu(*arguments, device=None, **options):
        return zeros(*arguments, device="cpu" if device == "cuda" else device, **options)

    torch.zeros = on_the_cpu
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


def build_engine(job):
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    class Engine(MegatronEngineWithLMHead):
        def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
            batch = next(batch_iter)
            ids = batch["input_ids"]
            padded, lengths = ids.to_padded_tensor(0), ids.offsets().diff().tolist()
            output = model(padded)
            if parallel_state.is_pipeline_last_stage():
                output = self._lm_head_logits_processor(
                    output,
                    padded.roll(-1, 1),
                    torch.ones(padded.shape),
                    calculate_sum_pi_squared=False,
                    calculate_entropy=False,
                    distillation_use_topk=False,
                    distillation_only=False,
                    logits_processor_func=logits_processor_func,
                    batch=batch,
                    data_format="bshd",
                )
                rows = [row[:length] for row, length in zip(output["log_probs"], lengths, strict=True)]
                output = {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
            return output, partial(postprocess_micro_batch_func, data=batch, local_cp_size=None)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=job["embedding"].shape[1],
        num_attention_heads=2,
        tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"],
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",  # the default refuses sequences of different lengths
    )
    config.calculate_per_token_loss = False
    model = Stage(job, config)
    engine = Engine.__new__(Engine)
    engine.module = [model]
    engine.tf_config = config
    engine.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False))
    engine.engine_config = SimpleNamespace(
        context_parallel_size=1,
        dynamic_context_parallel=False,
        pad_bshd_to_minibatch_max=False,
        use_remove_padding=True,
    )
    engine.enable_routing_replay = False
    return engine, model


class Stage(torch.nn.Module):
    """This rank's part of ``logits = tanh(embedding[ids]) @ head``; the head is split over the vocabulary."""

    def __init__(self, job, config):
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType

        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self._first, self._last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self._received = None
        if self._first:
            self.embedding = torch.nn.Parameter(job["embedding"].clone())
        if self._last:
            rank = parallel_state.get_tensor_model_parallel_rank()
            self.head = torch.nn.Parameter(job["head"].chunk(job["tp"], 1)[rank].clone())

    def set_input_tensor(self, received):
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, ids):
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        hidden = self.embedding[ids].tanh() if self._first else self._received
        return copy_to_tensor_model_parallel_region(hidden) @ self.head if self._last else hidden


def batch_of(job, rank, ranks):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    rows = {name: values[rank::ranks] for name, values in job["rows"].items()}
    columns = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    count = len(rows["responses"])
    data = TensorDict(columns, batch_size=count)
    options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": job["micro"], "global_batch_size": count * ranks}
    tensordict_utils.assign_non_tensor(data, **options)
    return data


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]))
