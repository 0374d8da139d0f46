"""LoRA by peft: the model is frozen, and low-rank matrices beside its linear layers are trained."""

import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coca_mindspeed.config.schema import LoraConfig
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.utils.packages import require

_WEIGHTS = "adapter_model.safetensors"


def require_peft(config: LoraConfig) -> None:
    """Raise ``MissingDependencyError`` if adapters are configured and peft is not installed."""
    if config.rank is not None:
        require("peft", purpose=f"model.lora.rank={config.rank}")


def dtype_of_weights(config: LoraConfig) -> torch.dtype:
    """The dtype to load weights in: ``base_dtype`` with adapters, else float32."""
    dtype: torch.dtype = torch.float32 if config.rank is None else getattr(torch, config.base_dtype)
    return dtype


def add_adapters(policy: Policy, config: LoraConfig, seed: int) -> None:
    """Freeze the model and add adapters, initially without effect; does nothing without ``model.lora.rank``.

    The global random state is not changed.

    Raises:
        ConfigError: no layer has such a name, or a target is the embedding or the LM head.
    """
    if config.rank is None:
        return
    require_peft(config)
    peft: Any = importlib.import_module("peft")
    model = policy.model
    for parameter in model.parameters():
        # Not Module.to, which would also round the rotary frequencies.
        parameter.data = parameter.data.to(getattr(torch, config.base_dtype))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, target_modules=config.targets, lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            policy.adapters = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets={config.targets}: {error}") from error
    policy.adapters.eval()
    for layer, kind in ((model.get_input_embeddings(), "embedding"), (model.get_output_embeddings(), "output layer")):
        if hasattr(layer, "lora_A"):
            raise ConfigError(f"model.lora.targets={config.targets}: names the {kind}, which cannot have adapters")


def save_adapters(policy: Policy, directory: Path) -> None:
    """Write the adapters in peft's format, with the base's fingerprint."""
    policy.adapters.save_pretrained(directory, save_embedding_layers=False)
    (directory / "base.sha256").write_text(base_fingerprint(policy) + "\n", encoding="utf-8")


def load_adapters(policy: Policy, directory: Path) -> None:
    """Load the policy's adapters from ``directory``.

    Raises:
        TrainingError: they are damaged, of another shape, or were trained on another base.
    """
    peft: Any = importlib.import_module("peft")
    try:
        base = (directory / "base.sha256").read_text(encoding="utf-8").strip()
        state = load_file(directory / _WEIGHTS, device=str(policy.device))
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise TrainingError(f"{directory}: holds no readable adapters: {error}") from error
    if base != base_fingerprint(policy):
        raise TrainingError(
            f"{directory}: its adapters were trained on another base model; restore the base model, or start a new run"
        )
    own = peft.get_peft_model_state_dict(policy.adapters)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in state.items()}:
        raise TrainingError(f"{directory / _WEIGHTS}: does not hold the adapters that model.lora describes")
    peft.set_peft_model_state_dict(policy.adapters, state)


def merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Weights of the plain model with adapters merged, float32, on the CPU; one at a time on the device."""
    layers = {name: module for name, module in policy.model.named_modules() if hasattr(module, "lora_A")}
    merged: dict[str, Tensor] = {}
    plain: dict[int, Tensor] = {}  # by address: tied weights stay one
    for name, value in policy.model.state_dict().items():
        owner, _, rest = name.partition(".base_layer.")
        adapted = bool(rest) and owner in layers
        if adapted and rest == "weight":
            merged[f"{owner}.{rest}"] = (value.float() + layers[owner].get_delta_weight("default").float()).cpu()
        elif ".lora_" not in name:
            address = value.data_ptr()
            plain.setdefault(address, value.cpu().float())
            merged[f"{owner}.{rest}" if adapted else name] = plain[address]
    return merged


def base_fingerprint(policy: Policy) -> str:
    """SHA-256 of names, shapes and a sample of every frozen weight."""
    digest = hashlib.sha256()
    for name, parameter in policy.model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, len(flat) // 1024)].float().cpu().numpy()
            digest.update(f"{name} {list(parameter.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()
