"""Megatron's sharded weights as one Hugging Face state dict, and back (dense Qwen2, Qwen3 and Llama layouts).

Tensor parallelism cuts a matrix along one dimension, pipeline parallelism deals out layers.  Query, key and value
are one matrix in Megatron, interleaved by query group; so are gate and up projection, one after the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.errors import ConfigError

#: Megatron's name inside a layer -> (Hugging Face's name, dimension that tensor parallelism cuts; None: replicated).
_LAYER_NAMES: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}
_OUTER_NAMES: dict[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model: Megatron's parameter names, layers numbered globally."""

    tensor_rank: int
    tensors: Mapping[str, Tensor]


def local_shard(chunks: Iterable[Any], tensor_rank: int) -> Shard:
    """A copy of this rank's parameters as they are now, on the CPU; ``chunks`` hold a ``GPTModel``, wrapped or not."""
    # Megatron's parameters are views into one buffer; a view is sent to other ranks with all that is behind it.
    return Shard(tensor_rank, {name: p.detach().clone().cpu() for name, p in named_parameters(chunks)})


def load_shard(chunks: Iterable[Any], state: Mapping[str, Tensor], layout: "Layout", tensor_rank: int) -> None:
    """Copy one rank's part of a Hugging Face state dict into its Megatron parameters."""
    with torch.no_grad():
        for name, parameter in named_parameters(chunks):
            value = layout.cut(name, state, tensor_rank)
            if value.shape != parameter.shape:
                raise ConfigError(f"{name}: Megatron has {tuple(parameter.shape)}, the weights {tuple(value.shape)}")
            parameter.copy_(value)


def named_parameters(chunks: Iterable[Any]) -> Iterable[tuple[str, Tensor]]:
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        numbers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
        for name, parameter in model.named_parameters():
            prefix = "decoder.layers."
            if name.startswith(prefix):
                index, _, rest = name[len(prefix) :].partition(".")
                yield f"{prefix}{numbers[int(index)]}.{rest}", parameter
            else:
                yield name, parameter


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes that say how Megatron interleaves."""

    query_groups: int
    heads: int
    head_size: int
    tensor_parallel: int
    tied_embeddings: bool

    @classmethod
    def of(cls, hf_config: Any, tensor_parallel: int) -> "Layout":
        """From a Hugging Face configuration of a dense Qwen2, Qwen3 or Llama model."""
        head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return cls(
            query_groups=hf_config.num_key_value_heads,
            heads=hf_config.num_attention_heads,
            head_size=head_size,
            tensor_parallel=tensor_parallel,
            tied_embeddings=bool(hf_config.tie_word_embeddings),
        )

    def join(self, shards: Iterable[Shard]) -> dict[str, Tensor]:
        """The whole model as a Hugging Face state dict, from the shards of one model-parallel group."""
        parts: dict[str, dict[int, Tensor]] = {}
        for shard in shards:
            for name, tensor in shard.tensors.items():
                parts.setdefault(name, {})[shard.tensor_rank] = tensor
        state: dict[str, Tensor] = {}
        for name, by_rank in parts.items():
            if len(by_rank) != self.tensor_parallel:
                raise ConfigError(f"{name}: found {len(by_rank)} of {self.tensor_parallel} tensor-parallel parts")
            state.update(self._join_one(name, [by_rank[rank] for rank in range(self.tensor_parallel)]))
        if self.tied_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def _join_one(self, name: str, parts: list[Tensor]) -> dict[str, Tensor]:
        prefix, rest, entry = _locate(name)
        if entry is not None:
            hf_name, dimension = entry
            return {prefix + hf_name: parts[0] if dimension is None else torch.cat(parts, dim=dimension)}
        if rest.startswith("mlp.linear_fc1."):
            halves = [part.chunk(2, dim=0) for part in parts]
            return {
                f"{prefix}mlp.gate_proj.weight": torch.cat([gate for gate, _ in halves]),
                f"{prefix}mlp.up_proj.weight": torch.cat([up for _, up in halves]),
            }
        kind = rest.rpartition(".")[2]
        whole = torch.cat(parts)
        per_group = self.heads // self.query_groups
        grouped = whole.view(self.query_groups, per_group + 2, self.head_size, *whole.shape[1:])
        cuts = grouped.split([per_group, 1, 1], dim=1)
        return {
            f"{prefix}self_attn.{projection}.{kind}": cut.reshape(-1, *whole.shape[1:])
            for projection, cut in zip(_QKV, cuts, strict=True)
        }

    def cut(self, name: str, state: Mapping[str, Tensor], tensor_rank: int) -> Tensor:
        """What Megatron's parameter ``name`` holds on tensor-parallel rank ``tensor_rank``."""
        prefix, rest, entry = _locate(name)

        def mine(tensor: Tensor, dimension: int) -> Tensor:
            return tensor.chunk(self.tensor_parallel, dim=dimension)[tensor_rank]

        if entry is not None:
            hf_name, dimension = entry
            if name == "output_layer.weight" and hf_name not in state:
                hf_name = "model.embed_tokens.weight"
            tensor = state[prefix + hf_name]
            return tensor if dimension is None else mine(tensor, dimension)
        if rest.startswith("mlp.linear_fc1."):
            gate, up = (state[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up"))
            return torch.cat([mine(gate, 0), mine(up, 0)])
        kind = rest.rpartition(".")[2]
        tensors = [state[f"{prefix}self_attn.{projection}.{kind}"] for projection in _QKV]
        grouped = [t.view(self.query_groups, -1, self.head_size, *t.shape[1:]) for t in tensors]
        whole = torch.cat(grouped, dim=1)
        return mine(whole, 0).reshape(-1, *tensors[0].shape[1:])


def _locate(name: str) -> tuple[str, str, tuple[str, int | None] | None]:
    """``(prefix of the layer, name within it, table entry or None for the fused matrices)``."""
    if name in _OUTER_NAMES:
        return "", name, _OUTER_NAMES[name]
    if name.startswith("decoder.layers."):
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        prefix = f"model.layers.{number}."
        if rest in _LAYER_NAMES:
            return prefix, rest, _LAYER_NAMES[rest]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "mlp.linear_fc1.weight"):
            return prefix, rest, None
    raise ConfigError(
        f"the host platform knows dense Qwen2, Qwen3 and Llama weights; Megatron has a parameter {name!r}"
    )
