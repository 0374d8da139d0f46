"""The policy: a causal language model with its tokenizer, device and number format, and LoRA by peft.

With LoRA the model is frozen, and low-rank matrices beside its linear layers are trained.
"""

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.config.schema import DEVICE_PATTERN, LoraConfig, ModelConfig
from coca_mindspeed.data.prompts import encode_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.local.lm_head import LMHead
from coca_mindspeed.utils.packages import require

#: ``prefix``: the batch's common prefix and each prompt are computed once; ``prompts``: each prompt; ``none``: nothing.
Sharing = Literal["prefix", "prompts", "none"]


@dataclass
class Policy:
    """A model that is sampled from and trained."""

    model: Any  # a Hugging Face causal LM
    tokenizer: Any  # its fast tokenizer, with a chat template
    text: TokenText  # the bytes of each token id
    eos_ids: tuple[int, ...]  # each of these ends a response
    pad_id: int  # padding; never sampled, unless it is also an end-of-sequence token
    compute_dtype: torch.dtype = torch.float32  # float32 or bfloat16; trained weights are float32 in either case
    adapters: Any = None  # peft's model around `model`, if adapters are trained
    sharing: Sharing = "prefix"  # which computations prompts may share without a change of the result
    # how responses are sampled: `shared`, in rows that they share while identical; `static`, in fixed buffers, on
    # CUDA by graphs; `auto`: `static` for tested architectures on CUDA
    decoding: Literal["auto", "shared", "static"] = "auto"
    # the buffers and graphs, kept for the next rollout
    static: Any = field(default=None, init=False, repr=False, compare=False)

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

    def sampling_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """Turn logits ``[..., vocabulary]`` into those of sampling and training: float32, tempered, PAD excluded."""
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if self.pad_id in self.eos_ids:
            return logits
        return logits.index_fill(-1, torch.full((1,), self.pad_id, device=logits.device), -torch.inf)

    def encode_prompts(self, records: Sequence[Record], system_prompt: str | None) -> list[list[int]]:
        """See :func:`~coca_mindspeed.data.prompts.encode_prompts`."""
        return encode_prompts(self.tokenizer, records, system_prompt)


def choose_device(name: str, *, where: str = "trainer.device") -> torch.device:
    """Resolve ``auto`` (CUDA, else NPU, else CPU) or a name; ConfigError, by the key ``where``, if there is none."""
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


def resolve_dtype(config: ModelConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Resolve ``compute_dtype: auto``: bfloat16 where the device reports instructions for it, or attention needs it."""
    if config.compute_dtype != "auto":
        return config.compute_dtype
    fast = True
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        fast = any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if fast or config.attention == "flash_attention_2" else "float32"


def is_out_of_memory(error: Exception) -> bool:
    """A CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _npu_count() -> int:
    """NPUs that PyTorch sees; it sees none without torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    importlib.import_module("torch_npu")
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
    return int(npu.device_count())


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

    The global random state is not changed.  Raises ConfigError for targets that are no layers, or the embedding or the
    LM head.
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
    """Load adapters; raises TrainingError if they are damaged, of another shape, or were trained on another base."""
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
