"""The policy: a causal language model with its tokenizer, the device that it is on, and its number format."""

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.config.schema import DEVICE_PATTERN, ModelConfig
from coca_mindspeed.data.prompts import encode_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.lm_head import LMHead

#: ``prefix``: the batch's common prefix and each prompt are computed once; ``prompts``: each prompt; ``none``: nothing.
Sharing = Literal["prefix", "prompts", "none"]


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
        decoding: how responses are sampled: ``shared``, in rows that they share while identical; ``static``, in fixed
            buffers, on CUDA by graphs; ``auto``: ``static`` for tested architectures on CUDA.
        static: the buffers and graphs, kept for the next rollout.
    """

    model: Any
    tokenizer: Any
    text: TokenText
    eos_ids: tuple[int, ...]
    pad_id: int
    compute_dtype: torch.dtype = torch.float32
    adapters: Any = None
    sharing: Sharing = "prefix"
    decoding: Literal["auto", "shared", "static"] = "auto"
    static: Any = field(default=None, repr=False)

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


def resolve_dtype(config: ModelConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Resolve ``compute_dtype: auto``: bfloat16 where the device has instructions for it, or attention needs it.

    A processor whose features PyTorch does not report has none.
    """
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
