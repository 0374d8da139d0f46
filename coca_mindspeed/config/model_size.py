"""How large a decoder is, from its shape: parameters, and bytes that a token's keys and values take."""

from dataclasses import dataclass
from typing import Protocol

GIB = 2**30
BF16, FP32 = 2, 4  # bytes of a number


class ModelShape(Protocol):
    """Protocol for anything with the fields of :class:`~coca_mindspeed.config.schema.ArchitectureConfig`."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_groups(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def untied_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a memory estimate: name, bytes on the fullest device, and the formula in words."""

    name: str
    bytes: float
    formula: str

    @property
    def gib(self) -> float:
        return self.bytes / GIB


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of one layer: attention with grouped keys and values, gated MLP, RMSNorms."""
    head = shape.hidden // shape.heads
    kv = shape.kv_groups * head
    qkv = shape.hidden * (shape.hidden + 2 * kv) + (shape.hidden + 2 * kv if shape.qkv_bias else 0)
    qkv += 2 * head if shape.qk_layernorm else 0
    return qkv + shape.hidden * shape.hidden + 3 * shape.hidden * shape.ffn + 2 * shape.hidden


def model_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model."""
    embeddings = shape.vocab * shape.hidden * (2 if shape.untied_embeddings else 1)
    return shape.layers * layer_parameters(shape) + embeddings + shape.hidden


def kv_bytes_per_token(shape: ModelShape, tensor_parallel: int) -> float:
    """Bytes of one token's keys and values in bfloat16, on one of ``tensor_parallel`` devices."""
    return 2 * BF16 * shape.layers * shape.kv_groups * (shape.hidden // shape.heads) / tensor_parallel
