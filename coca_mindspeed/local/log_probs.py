"""Log-probs of given responses under the policy, with gradient: the forward pass of the update."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.local.output_layer import TokenScores, scores_of_logits
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
    """Log-prob of every response token, float32 ``[P * G, tokens]``; see :func:`response_scores`."""
    return response_scores(policy, prompts, token_ids, temperature=temperature, share_prompts=share_prompts).log_probs


def response_scores(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    temperature: float,
    share_prompts: bool = True,
) -> TokenScores:
    """Log-prob and entropy of every response token.

    Few logits are computed at once; many, a chunk of tokens at a time, and once more in the backward pass.  The result
    is the same (:mod:`coca_mindspeed.local.output_layer`).

    Args:
        policy: the policy.
        prompts: P prompts.
        token_ids: int64 ``[P * G, tokens]``, whole groups; what stands behind a response's end is computed as well
            and means nothing.
        temperature: as in sampling.
        share_prompts: run each prompt once and let its group's responses attend to its keys and values, gradient
            included.  The result is the same; the prompt's share of the work is divided by G.

    Returns:
        float32 ``[P * G, tokens]`` each.
    """
    if len(token_ids) % len(prompts):
        raise ValueError(f"token_ids has {len(token_ids)} rows, expected a multiple of the {len(prompts)} prompts")
    group_size = len(token_ids) // len(prompts)
    layer = policy.output_layer
    with policy.autocast():
        states = (_shared if share_prompts else _plain)(policy, prompts, token_ids, group_size)
        if not layer.fits_one_chunk(token_ids.numel()):
            return layer.scores(
                torch.cat([part.repeat_interleave(len(token_ids) // len(part), dim=0) for part in states], dim=1),
                token_ids,
                lambda logits: policy.logits_of_policy(logits, temperature),
            )
        # Each part's logits come before the next part's pass: autograd adds up gradients in the order of the forward.
        parts = [layer.logits(part) for part in states]
        logits = torch.cat([part.repeat_interleave(len(token_ids) // len(part), dim=0) for part in parts], dim=1)
    return scores_of_logits(policy.logits_of_policy(logits, temperature), token_ids)


def _shared(policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, group_size: int) -> Iterator[Tensor]:
    """Hidden states that predict the responses: of the first tokens ``[P, 1, hidden]``, and of the others."""
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    cache = DynamicCache(config=policy.model.config)
    # The prompt's last state predicts the response's first token.
    first = policy.output_layer.hidden_states(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask, ids),
        past_key_values=cache,
        use_cache=True,
    )[:, -1:]
    yield first
    if token_ids.shape[1] == 1:
        return
    cache.batch_repeat_interleave(group_size)
    lengths = torch.tensor([len(p) for p in prompts], device=policy.device).repeat_interleave(group_size)
    offsets = torch.arange(token_ids.shape[1] - 1, device=policy.device)
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([mask.repeat_interleave(group_size, dim=0), inside], dim=1)
    yield policy.output_layer.hidden_states(
        input_ids=token_ids[:, :-1],
        attention_mask=mask,
        position_ids=lengths[:, None] + offsets,
        past_key_values=cache,
        use_cache=True,
    )


def _plain(policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, group_size: int) -> Iterator[Tensor]:
    """Hidden states that predict the responses' tokens, ``[P * G, tokens, hidden]``."""
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    ids = torch.cat([ids.repeat_interleave(group_size, dim=0), token_ids[:, :-1]], dim=1)
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([mask.repeat_interleave(group_size, dim=0), inside], dim=1)
    states = policy.output_layer.hidden_states(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask, ids),
        use_cache=False,
    )
    yield states[:, -token_ids.shape[1] :]
