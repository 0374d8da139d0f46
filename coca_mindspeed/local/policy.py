"""A causal language model with its tokenizer, loaded from a Hugging Face directory; activation checkpointing."""

import copy
import functools
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.config.schema import DEVICE_PATTERN, ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.attention import suggest_eager_attention, use_fast_attention
from coca_mindspeed.local.lm_head import LMHead, add_embedding_gradients
from coca_mindspeed.local.model_files import encode_prompts, load_tokenizer, read_model_config
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.tokenization import token_text


def checkpoint_activations(model: Any) -> None:
    """Activation checkpointing: every decoder layer keeps only its input and runs again in the backward pass.

    Transformers' own is inactive in eval mode (which disables dropout) and removes the KV cache (which shared prompts
    need).  Raises ValueError if no layer of the model supports it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"a {type(model).__name__} has no layers that can be recomputed; set model.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Architectures pass the cache under different names.
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    # Layers replace their tensors and never write into them, so shallow copies keep the old state.
    before: dict[int, Any] = dict(enumerate(map(copy.copy, cache.layers)))
    recomputing = False

    def from_before(*args: Any, **kwargs: Any) -> Any:
        """Run on the cache as it was before this layer."""
        nonlocal recomputing
        view = copy.copy(cache)
        view.layers = _Layers(copy.copy(before.get(number)) for number in range(len(cache.layers)))
        output = forward(
            *(view if value is cache else value for value in args),
            **{name: view if value is cache else value for name, value in kwargs.items()},
        )
        if not recomputing:
            for number in before.keys() - view.layers.used:
                del before[number]  # not needed until the backward pass
            cache.layers[:], recomputing = view.layers, True
        return output

    return checkpoint(from_before, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Layers(list[Any]):
    """A cache's layers; records which of them were used."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__(layers)
        self.used: set[int] = set()

    def __getitem__(self, number: Any) -> Any:
        self.used.update([number] if isinstance(number, int) else range(len(self))[number])
        return super().__getitem__(number)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


#: Computed once: the batch's common prefix and each prompt for its group; each prompt for its group; nothing.  With
#: prompts of several lengths, padding follows a shared prefix, and windows and ALiBi may count it (:mod:`.self_test`).
Sharing = Literal["prefix", "prompts", "none"]

_SHARED = {"prefix": "prompts and their common prefix", "prompts": "prompts alone", "none": "nothing"}


@dataclass
class Policy:
    """A model that is sampled from and trained.

    Attributes:
        model: a Hugging Face causal LM.
        tokenizer: its fast tokenizer, with a chat template.
        text: the bytes of each token id.
        eos_ids: each of these ends a response.
        pad_id: padding; never sampled, unless it is also an end-of-sequence token.
        compute_dtype: float32 or bfloat16; trained weights are float32 in either case.
        adapters: peft's model around :attr:`model`, if adapters are trained.
        sharing: which computations prompts may share without a change of the result.
    """

    model: Any
    tokenizer: Any
    text: TokenText
    eos_ids: tuple[int, ...]
    pad_id: int
    compute_dtype: torch.dtype = torch.float32
    adapters: Any = None
    sharing: Sharing = "prefix"

    @property
    def vocabulary(self) -> int:
        """Tokens of the LM head."""
        return len(self.lm_head.head.weight)

    def autocast(self) -> torch.autocast:
        """Compute in :attr:`compute_dtype`; enter it once around a loop, so that weights are cast once."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16)

    @cached_property
    def lm_head(self) -> LMHead:
        """The LM head; raises ValueError if it is not linear."""
        return LMHead.of(self.model)

    @property
    def end_of_turn(self) -> int:
        """The end token of an SFT response: the tokenizer's own, else the first of :attr:`eos_ids`."""
        named = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return named if named in self.eos_ids else self.eos_ids[0]

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def logits_of_policy(self, logits: Tensor, temperature: float) -> Tensor:
        """Turn logits ``[..., vocabulary]`` into those of sampling and training: float32, tempered, PAD excluded."""
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if self.pad_id in self.eos_ids:
            return logits
        return logits.index_fill(-1, torch.full((1,), self.pad_id, device=logits.device), -torch.inf)

    def encode_prompts(self, records: Sequence[Record], system_prompt: str | None) -> list[list[int]]:
        """See :func:`~coca_mindspeed.local.model_files.encode_prompts`."""
        return encode_prompts(self.tokenizer, records, system_prompt)


def choose_device(name: str, *, where: str = "trainer.device") -> torch.device:
    """Resolve ``auto`` (CUDA if available, else NPU, else CPU), ``cpu``, ``cuda``, ``cuda:N``, ``npu`` or ``npu:N``.

    Raises:
        ConfigError: another name, or no such device; ``where`` is the key or option.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "npu" if _npu_count() else "cpu")
    if not re.fullmatch(DEVICE_PATTERN, name):
        raise ConfigError(f"{where}={name}: expected auto, cpu, cuda, cuda:N, npu or npu:N")
    if name.startswith("npu") and not _npu_count():  # torch knows the name once torch_npu is imported
        raise ConfigError(f"{where}={name}: PyTorch sees 0 NPU devices; is torch_npu installed?")
    device = torch.device(name)
    counts = {"cuda": torch.cuda.device_count, "npu": _npu_count}
    if device.type in counts and (device.index or 0) >= counts[device.type]():
        raise ConfigError(f"{where}={name}: PyTorch sees {counts[device.type]()} {device.type.upper()} devices")
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions; False for a processor whose features PyTorch does not report."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))


def resolve_dtype(config: ModelConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Resolve ``compute_dtype: auto``; flash attention needs bfloat16."""
    if config.compute_dtype != "auto":
        return config.compute_dtype
    return "bfloat16" if config.attention == "flash_attention_2" or has_bfloat16(device) else "float32"


def _npu_count() -> int:
    """NPUs that PyTorch sees; it sees none without torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    importlib.import_module("torch_npu")
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
    return int(npu.device_count())


def load_policy(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    where: str = "model.path",
) -> Policy:
    """Load a policy from a local Hugging Face directory; nothing is downloaded.

    ``dtype`` is that of the weights (trained weights need float32), ``where`` the key that named the path.

    Raises:
        ConfigError: the directory does not load, lacks a chat template or weights, or the model is not supported.
    """
    missing = device.type != "npu" and importlib.util.find_spec("flash_attn") is None  # NPUs have their own
    if config.attention == "flash_attention_2" and missing:
        raise ConfigError("model.attention=flash_attention_2: needs the package flash-attn, which is not installed")
    tokenizer = load_tokenizer(path, config, where=where)
    read_model_config(path, config, where=where)
    try:
        with suggest_eager_attention(config.attention, f"{where}={path}"):
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below by their keys
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{where}={path}: cannot be loaded as a causal language model: {error}") from error
    _check_all_weights_loaded(model, loading, f"{where}={path}")
    _check_tied_weights(model, path, f"{where}={path}")
    model = model.to(device)
    use_fast_attention(model, device)
    add_embedding_gradients(model, device)
    model.eval()  # dropout would make sampling and training differ
    eos_ids = _eos_ids(model, tokenizer)
    if not eos_ids:
        raise ConfigError(
            f"{where}={path}: neither its generation config nor its tokenizer names an end-of-sequence token"
        )
    # Exported with the model, so that a server stops where training did.
    model.generation_config.eos_token_id = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    try:
        text = token_text(tokenizer, len(LMHead.of(model).head.weight))
        policy = Policy(model, tokenizer, text, eos_ids, pad_id, getattr(torch, resolve_dtype(config, device)))
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        _choose_computation(policy, config, f"{where}={path}")
    except ValueError as error:
        raise ConfigError(f"{where}={path}: {error}") from error
    return policy


def _choose_computation(policy: Policy, config: ModelConfig, where: str) -> None:
    """Set attention and sharing by the self-test; print a note if they differ from the configuration."""
    from coca_mindspeed.local.self_test import choose_computation  # it imports this module

    problem = choose_computation(policy)
    if not problem:
        return
    eager = policy.model.config._attn_implementation == "eager"
    kind = "warning" if eager and config.attention != "eager" else "note"
    print_text(
        f"{kind}: {where}: with model.attention={config.attention} and a shared prefix, {problem}; computed with "
        f"model.attention={'eager' if eager else config.attention}, shared: {_SHARED[policy.sharing]}",
        sys.stderr,
    )


def _check_all_weights_loaded(model: Any, loading: Mapping[str, Any], where: str) -> None:
    """Refuse missing, unexpected and mismatched weights, for which transformers only warns."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    problems = {
        "has no": set(loading["missing_keys"]) - tied,
        "has more than the architecture:": set(loading["unexpected_keys"]),
        "has in another shape:": {key[0] if isinstance(key, tuple) else key for key in loading["mismatched_keys"]},
    }
    for problem, keys in problems.items():
        if keys:
            first = ", ".join(sorted(keys)[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ConfigError(
                f"{where}: its weights are not those of a {type(model).__name__}: "
                f"the checkpoint {problem} {first}{more}"
            )


def _check_tied_weights(model: Any, path: Path, where: str) -> None:
    """Refuse a checkpoint with different tensors for tied weights, of which transformers keeps one."""
    embedding = model.get_input_embeddings().weight
    tied = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight is embedding}
    stored = _stored_weights(path, tied) if len(tied) > 1 else {}
    if not all(torch.equal(weight, other) for weight, other in itertools.pairwise(stored.values())):
        raise ConfigError(
            f"{where}: its config.json has tie_word_embeddings: true, but its checkpoint holds different tensors "
            f"{' and '.join(sorted(stored))}; set tie_word_embeddings: false in config.json"
        )


def _stored_weights(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of these names in the files that transformers loads."""
    stored: dict[str, Tensor] = {}
    files = list(path.glob("model*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118
    for file in () if files else path.glob("pytorch_model*.bin"):
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        stored |= {name: tensor for name, tensor in tensors.items() if name in names}
    return stored


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation config (often several) and of the tokenizer."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(i for i in [*listed, tokenizer.eos_token_id] if i is not None))
