"""Log-probs of given responses under the policy, with gradient: the forward pass of the update."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import pad_left, positions_of


def response_log_probs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    temperature: float,
    share_prompts: bool = True,
) -> Tensor:
    """Log-prob of every response token.

    Args:
        policy: the policy.
        prompts: P prompts.
        token_ids: int64 ``[P * G, tokens]``, whole groups; what stands behind a response's end is computed as well
            and means nothing.
        temperature: as in sampling.
        share_prompts: run each prompt once and let its group's responses attend to its keys and values, gradient
            included.  The result is the same; the prompt's share of the work is divided by G.

    Returns:
        float32 ``[P * G, tokens]``.
    """
    if len(token_ids) % len(prompts):
        raise ValueError(f"token_ids has {len(token_ids)} rows, expected a multiple of the {len(prompts)} prompts")
    group_size = len(token_ids) // len(prompts)
    with policy.autocast():
        logits = (_shared if share_prompts else _plain)(policy, prompts, token_ids, group_size)
    distribution = policy.logits_of_policy(logits, temperature).log_softmax(dim=-1)
    log_probs: Tensor = distribution.gather(-1, token_ids[..., None]).squeeze(-1)
    return log_probs


def _shared(policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, group_size: int) -> Tensor:
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    cache = DynamicCache(config=policy.model.config)
    # The prompt's last logits predict the response's first token.
    first: Tensor = policy.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask, ids),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits.repeat_interleave(group_size, dim=0)
    if token_ids.shape[1] == 1:
        return first
    cache.batch_repeat_interleave(group_size)
    lengths = torch.tensor([len(p) for p in prompts], device=policy.device).repeat_interleave(group_size)
    offsets = torch.arange(token_ids.shape[1] - 1, device=policy.device)
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([mask.repeat_interleave(group_size, dim=0), inside], dim=1)
    rest = policy.model(
        input_ids=token_ids[:, :-1],
        attention_mask=mask,
        position_ids=lengths[:, None] + offsets,
        past_key_values=cache,
        use_cache=True,
    ).logits
    return torch.cat([first, rest], dim=1)


def _plain(policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, group_size: int) -> Tensor:
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    ids = torch.cat([ids.repeat_interleave(group_size, dim=0), token_ids[:, :-1]], dim=1)
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([mask.repeat_interleave(group_size, dim=0), inside], dim=1)
    logits: Tensor = policy.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask, ids),
        use_cache=False,
        logits_to_keep=token_ids.shape[1],
    ).logits
    return logits
