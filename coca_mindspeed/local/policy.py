"""The policy: a causal language model with its tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.lm_head import LMHead
from coca_mindspeed.local.model_files import encode_prompts

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

    def sampling_logits(self, logits: Tensor, temperature: float) -> Tensor:
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
