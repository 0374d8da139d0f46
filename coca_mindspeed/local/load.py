"""Load a policy from a Hugging Face directory, refuse a checkpoint that does not fit, and checkpoint activations."""

import copy
import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.lm_head import LMHead, add_embedding_gradients
from coca_mindspeed.local.model_files import load_model_tokenizer, read_model_config
from coca_mindspeed.local.plain import DTYPE, PLAIN, RELEASE
from coca_mindspeed.local.policy import Policy, Sharing, resolve_dtype
from coca_mindspeed.local.sampler import Decoder
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.text_formats import read_yaml
from coca_mindspeed.utils.tokenization import token_text

#: ``model_type`` of the architectures that a test compares with plain passes.
TESTED = frozenset(read_yaml(Path(__file__).with_name("architectures.yaml"))["tested"])
_WINDOWS = ("sliding_window", "attention_chunk_size")  # None or 0: no layer has one
_TOLERANCE, _TOLERANCE_OF_BFLOAT16 = 1e-2, 0.2  # nats; float32 is off by 1e-5


def load_policy(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,  # of the weights; trained ones need float32
    where: str = "model.path",
) -> Policy:
    """Load a policy from a local Hugging Face directory, named by the key ``where``; ConfigError if it is unusable."""
    missing = device.type != "npu" and importlib.util.find_spec("flash_attn") is None  # NPUs have their own
    if config.attention == "flash_attention_2" and missing:
        raise ConfigError("model.attention=flash_attention_2: needs the package flash-attn, which is not installed")
    tokenizer = load_model_tokenizer(path, config, where=where)
    architecture = read_model_config(path, config, where=where)
    sharing, attention = sharing_of(architecture, config), config.attention
    if sharing == "none":
        attention = "eager" if attention == "sdpa" else attention
        reason = f"{architecture.model_type} is not a tested architecture"
        if PLAIN:
            reason = f"transformers {RELEASE} is older than 4.57"
        print_note(f"note: {where}={path}: {reason} (docs/training.md): {attention} attention, no prefix sharing")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below by their keys
            **{DTYPE: dtype},
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{where}={path}: cannot be loaded as a causal language model: {error}") from error
    _check_all_weights_loaded(model, loading, f"{where}={path}")
    _check_tied_weights(model, path, f"{where}={path}")
    model = model.to(device)
    if not PLAIN:
        from coca_mindspeed.local.attention import use_fast_attention  # it imports modules that older releases lack

        use_fast_attention(model, device)
    add_embedding_gradients(model, device)
    model.eval()  # dropout would make sampling and training differ
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    eos_ids = tuple(dict.fromkeys(i for i in [*listed, tokenizer.eos_token_id] if i is not None))
    if not eos_ids:
        raise ConfigError(
            f"{where}={path}: neither its generation config nor its tokenizer names an end-of-sequence token"
        )
    # Exported with the model, so that a server stops where training did.
    model.generation_config.eos_token_id = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    try:
        text = token_text(tokenizer, len(LMHead.of(model).head.weight))
        compute_dtype = getattr(torch, resolve_dtype(config, device))
        policy = Policy(model, tokenizer, text, eos_ids, pad_id, compute_dtype, sharing=sharing)
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        if sharing == "none":
            check_sampler(policy)
    except ValueError as error:
        raise ConfigError(f"{where}={path}: {error}") from error
    return policy


def sharing_of(architecture: Any, config: ModelConfig) -> Sharing:
    """Sharing of prompts: none in an untested architecture or on the plain path, no prefix with windows.

    A window would count padding behind a prefix.
    """
    remote = config.trust_remote_code and hasattr(architecture, "auto_map")
    if PLAIN or architecture.model_type not in TESTED or remote:
        return "none"
    return "prompts" if any(getattr(architecture, name, None) for name in _WINDOWS) else "prefix"


def check_sampler(policy: Policy) -> None:
    """Raise ValueError if log-probs of the sampler, with padding and a cache, differ from those of plain passes."""
    refusal = f"a {type(policy.model).__name__} cannot be sampled and trained here"
    try:
        off = _error_of_sampler(policy)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the architecture's code
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{refusal}: {type(error).__name__}: {reason}") from error
    exact = policy.compute_dtype == policy.model.dtype == torch.float32
    if not off <= (_TOLERANCE if exact else _TOLERANCE_OF_BFLOAT16):
        raise ValueError(f"{refusal}: the sampler's log-probs differ from those of plain passes by {off:.2g}")


def _error_of_sampler(policy: Policy) -> float:
    """The largest difference in nats, of two short random texts."""
    random = torch.Generator().manual_seed(0)
    texts = torch.randint(policy.vocabulary, (2, 10), generator=random).to(policy.device)
    prompts = [texts[0, :6].tolist(), texts[1, :3].tolist()]
    with torch.inference_mode(), policy.autocast():
        decoder = Decoder(policy, prompts)
        sampled = [decoder.logits]
        for t in range(4):
            decoder.step(torch.stack([texts[0, 6 + t], texts[1, 3 + t]])[:, None])
            sampled.append(decoder.logits)
        plain = [policy.model(input_ids=text[None], use_cache=False).logits[0] for text in (texts[0], texts[1, :7])]
    expected = torch.stack([logits[-5:] for logits in plain], dim=1).float().log_softmax(dim=-1)
    return float((torch.stack(sampled).float().log_softmax(dim=-1) - expected).abs().max())


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
    """Refuse a checkpoint with different tensors for tied weights, of which transformers or a server keeps one."""
    weights = [model.get_input_embeddings().weight]
    if model.config.get_text_config().tie_word_embeddings:  # transformers 5 unties different ones
        weights.append(model.get_output_embeddings().weight)
    named = model.named_parameters(remove_duplicate=False)
    tied = {name for name, weight in named if any(weight is each for each in weights)}
    stored: dict[str, Tensor] = {}
    files = list(path.glob("model*.safetensors")) if len(tied) > 1 else []  # as transformers chooses
    for file in files:
        with safe_open(file, "pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys() if name in tied}  # noqa: SIM118
    for file in path.glob("pytorch_model*.bin") if len(tied) > 1 and not files else ():
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        stored |= {name: tensor for name, tensor in tensors.items() if name in tied}
    if not all(torch.equal(weight, other) for weight, other in itertools.pairwise(stored.values())):
        raise ConfigError(
            f"{where}: its config.json has tie_word_embeddings: true, but its checkpoint holds different tensors "
            f"{' and '.join(sorted(stored))}; set tie_word_embeddings: false in config.json"
        )


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
    before = list(map(copy.copy, cache.layers))
    recomputing = False

    def from_before(*args: Any, **kwargs: Any) -> Any:
        """Run on the cache as it was before this layer."""
        nonlocal recomputing
        view = cache
        if recomputing:
            view = copy.copy(cache)
            view.layers = list(map(copy.copy, before))
        recomputing = True
        given = {name: view if value is cache else value for name, value in kwargs.items()}
        return forward(*(view if value is cache else value for value in args), **given)

    return checkpoint(from_before, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
