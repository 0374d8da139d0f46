"""Prompts of several lengths as one batch, and the pass that puts them into a KV cache.

Chat prompts start alike: the template's opening and the system prompt, of which there are often more tokens than of the
question.  What all prompts of a batch start with is run once, as each prompt is run once for its whole group.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.local.prefix_sharing import GoOn, go_on

#: How much is computed once: the prefix that all prompts of a batch start with, and each prompt for its group; each
#: prompt for its group; nothing.  Padding lies between a shared prefix and what follows, where prompts are not of one
#: length, and windows and ALiBi may count it (:mod:`.self_test`).
Sharing = Literal["prefix", "prompts", "none"]

_WORTH_A_PASS = 16  # tokens; a shorter start costs more as a pass of its own than it saves


class PromptPass(NamedTuple):
    """What a batch of P prompts left behind.

    Attributes:
        output: what ``forward`` made of the prompts' last tokens, ``[P, tokens, ...]``; the last column is their ends.
        mask: bool ``[P, width]`` of the cache's columns, False where a prompt is padded; None where none is.
        lengths: int64 ``[P]``, tokens of each prompt.
        width: columns of the cache.
    """

    output: Any
    mask: Tensor | None
    lengths: Tensor
    width: int


def run_prompts(
    forward: Callable[..., Any],
    prompts: Sequence[Sequence[int]],
    cache: DynamicCache,
    pad_id: int,
    device: torch.device,
    go_on: GoOn = go_on,
    sharing: Sharing = "prefix",
) -> PromptPass:
    """Fill an empty cache with prompts.

    Args:
        forward: a causal LM's body or the like; with gradient or without.
        prompts: token ids, at least one each.
        cache: empty; afterwards it has one row a prompt.
        pad_id: fills shorter prompts up, on the left.
        device: of the model.
        go_on: how the prompts' own tokens go on from what all of them start with.
        sharing: whether what all of them start with is run once.
    """
    shared = shared_start(prompts, sharing)
    if shared:
        start = torch.tensor([prompts[0][:shared]], device=device)
        positions = torch.arange(shared, device=device)[None]
        forward(input_ids=start, attention_mask=None, position_ids=positions, past_key_values=cache, use_cache=True)
    ids, mask = pad_left([prompt[shared:] for prompt in prompts], pad_id, device)
    positions = positions_of(mask, ids) + shared
    if mask is not None and shared:
        mask = torch.nn.functional.pad(mask, (shared, 0), value=True)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    if shared:
        repeat = functools.partial(cache.batch_repeat_interleave, len(prompts))
        output = go_on(forward, repeat, **inputs, use_cache=True)
    else:
        output = forward(**inputs, use_cache=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return PromptPass(output, mask, lengths, shared + ids.shape[1])


def shared_start(prompts: Sequence[Sequence[int]], sharing: Sharing = "prefix") -> int:
    """How many tokens all prompts start with, if they are worth a pass; each keeps a token that is its own.

    Args:
        prompts: token ids, at least one each.
        sharing: 0 unless it is ``prefix``.
    """
    if len(prompts) == 1 or sharing != "prefix":
        return 0
    first, last = min(map(list, prompts)), max(map(list, prompts))  # the two that part earliest
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    same = min(same, min(map(len, prompts)) - 1)
    return same if same >= _WORTH_A_PASS else 0


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as ``[P, longest]`` ids, and their bool mask; no mask where nothing needed padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    if all(len(p) == width for p in prompts):
        return ids, None
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device) >= (width - lengths)[:, None]


def positions_of(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Positions that start from 0 at each prompt's first real token, int64 ``[rows, tokens]``."""
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
