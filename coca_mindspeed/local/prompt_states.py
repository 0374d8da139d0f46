"""Hidden states of prompts, where the answer is about to begin: what a model knows before it has said anything."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of


def prompt_states(policy: Policy, prompts: Sequence[Sequence[int]], layer: int) -> Tensor:
    """Hidden states of each prompt's last token.

    Args:
        policy: the model; it is not changed.
        prompts: token ids of n prompts, all in one batch.
        layer: 0 is the embedding, i the output of block i, negative ones count from the last; Hugging Face models
            give the last one after the final norm.

    Returns:
        float32 ``[n, hidden]`` on the CPU.
    """
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    with torch.inference_mode(), policy.autocast():
        output = policy.output_layer.body(
            input_ids=ids,
            attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
            position_ids=positions_of(mask, ids),
            output_hidden_states=True,
            use_cache=False,
        )
    states: Tensor = output.hidden_states[layer][:, -1].float().cpu()
    return states.clone()  # inference tensors may not enter a graph
