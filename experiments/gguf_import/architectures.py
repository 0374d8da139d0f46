"""Check the architecture of a GGUF file: its sizes, and the name and shape of every tensor.

The checks run before a model is built, because transformers would build any declared size, initialise missing tensors
at random and ignore unknown ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from experiments.gguf_import.header import GgufHeader

ARCHITECTURES = ("llama", "qwen2")
_SIZES = {
    "block_count": "layers",
    "embedding_length": "hidden size",
    "feed_forward_length": "inner size of the MLP",
    "attention.head_count": "attention heads",
    "attention.head_count_kv": "key/value heads",
    "context_length": "positions",
}
_NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
_SHOWN = 3


def check_architecture(header: GgufHeader, path: Path) -> str:
    """Return the architecture, ``llama`` or ``qwen2``.

    Raises:
        DataError: another architecture, a missing or impossible size, a missing, unknown or misshapen tensor, or scaled
            rotary frequencies.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise DataError(f"{path}: general.architecture is {architecture!r:.80}; this command reads {known}")
    sizes = _sizes(header.metadata, architecture, path)
    if scaling := _rope_scaling(header):
        raise DataError(
            f"{path}: {scaling}: transformers does not read scaled rotary frequencies from GGUF, which change "
            "later positions; use the publisher's Hugging Face files"
        )
    _check_heads(header.metadata, architecture, sizes, path)
    if sizes["block_count"] > len(header.shapes):
        raise DataError(
            f"{path}: {architecture}.block_count declares {sizes['block_count']} layers, "
            f"and the file has {len(header.shapes)} tensors"
        )
    _check_shapes(_expected_shapes(header, architecture, sizes, path), header.shapes, path)
    return str(architecture)


def _sizes(metadata: Mapping[str, Any], architecture: str, path: Path) -> dict[str, int]:
    sizes = {}
    for key, meaning in _SIZES.items():
        value = metadata.get(f"{architecture}.{key}")
        if type(value) is not int or value < 1:
            raise DataError(f"{path}: {architecture}.{key} ({meaning}) should be 1 or more, found {value!r:.80}")
        sizes[key] = value
    for key in _NUMBERS:
        value = metadata.get(f"{architecture}.{key}")
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise DataError(f"{path}: {architecture}.{key} should be a number above 0, found {value!r:.80}")
    return sizes


def _rope_scaling(header: GgufHeader) -> str | None:
    if "rope_freqs.weight" in header.shapes:
        return "it holds rope_freqs.weight"
    for key, value in header.metadata.items():
        if key.endswith(".rope.scaling.type") and value != "none":
            return f"{key} is {value!r:.80}"
        # A factor without a type means linear scaling; 0 means none.
        if key.endswith((".rope.scaling.factor", ".rope.scale_linear")) and value not in (0, 1):
            return f"{key} is {value!r:.80}"
    return None


def _check_heads(metadata: Mapping[str, Any], architecture: str, sizes: Mapping[str, int], path: Path) -> None:
    heads, groups, hidden = (
        sizes[key] for key in ("attention.head_count", "attention.head_count_kv", "embedding_length")
    )
    if heads % groups or hidden % heads or hidden // heads % 2:
        raise DataError(
            f"{path}: {heads} attention heads of {hidden} dimensions and {groups} key/value heads; expected heads "
            "that divide the hidden size into even parts, and key/value heads that divide the heads"
        )
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        found = metadata.get(f"{architecture}.{key}", hidden // heads)
        if found != hidden // heads:
            raise DataError(
                f"{path}: {architecture}.{key} is {found!r:.80}; expected the size of a head, {hidden // heads}"
            )


def _expected_shapes(
    header: GgufHeader, architecture: str, sizes: Mapping[str, int], path: Path
) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes["embedding_length"], sizes["feed_forward_length"]
    keys = hidden // sizes["attention.head_count"] * sizes["attention.head_count_kv"]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise DataError(f"{path}: tokenizer.ggml.tokens should be a list of strings, found {tokens!r:.80}")
    vocabulary = header.metadata.get(f"{architecture}.vocab_size", len(tokens))
    if type(vocabulary) is not int or vocabulary < len(tokens):
        raise DataError(
            f"{path}: {architecture}.vocab_size is {vocabulary!r:.80}, and tokenizer.ggml.tokens has {len(tokens)}"
        )
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (hidden, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, hidden),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (hidden,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    shapes = {f"blk.{i}.{name}": shape for i in range(sizes["block_count"]) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    if "output.weight" in header.shapes:  # absent: tied to the embedding
        shapes["output.weight"] = (vocabulary, hidden)
    return shapes


def _check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    problems = {
        "lacks": [name for name in expected if name not in found],
        "has more than its architecture:": [name for name in found if name not in expected],
        "has in another shape:": [
            f"{name} {found[name]} in place of {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise DataError(f"{path}: {problem} {', '.join(names[:_SHOWN])}{more}")
