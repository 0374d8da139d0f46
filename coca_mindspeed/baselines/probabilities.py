"""Probabilities of questions under the model.

Question probability (paper, section 4.1): ``c = mean over the question's tokens of P(x_i | x_<i)``.  The question's
tokens are those with at least one character of the record's question; system prompt, answer instruction and template
are context only.  The first token of the text has no probability and is left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coca_mindspeed.baselines.target_model import TargetModel
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of

# Replaces the user's message to find the template's own text.
_SENTINEL = "7f3aquestion0c55"


def question_probabilities(target: TargetModel, records: Sequence[Record]) -> list[float]:
    """Return the confidence of each record, in [0, 1]; one batch.

    Raises DataError if a question cannot be found in its prompt.
    """
    policy, system_prompt = target.policy, target.method.training_method.system_prompt
    prompts = policy.encode_prompts(records, system_prompt)
    places = [question_tokens(policy, record, system_prompt) for record in records]
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    with torch.inference_mode(), policy.autocast():
        states = policy.lm_head.hidden_states(
            input_ids=ids, attention_mask=mask, position_ids=positions_of(mask, ids), use_cache=False
        )
        result = []
        for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
            position = torch.tensor(place, device=policy.device) + (ids.shape[1] - len(prompt))
            scores = policy.lm_head.scores(states[row, position - 1], ids[row, position], Tensor.float)
            result.append(float(scores.log_probs.exp().mean()))
    return result


def question_tokens(policy: Policy, record: Record, system_prompt: str | None) -> list[int]:
    """Return the positions in the prompt of the question's tokens that have a predecessor.

    Raises DataError if the chat template changes the question, or no token is left.
    """
    messages = prompt_messages(record, system_prompt)
    rendered, blank = (
        policy.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        for conversation in (messages, [*messages[:-1], {**messages[-1], "content": _SENTINEL}])
    )
    question = record.question.strip()
    start = blank.index(_SENTINEL) if _SENTINEL in blank else len(rendered)
    start += len(rendered[start:]) - len(rendered[start:].lstrip())  # some templates strip the message, some do not
    if not rendered.startswith(question, start):
        raise DataError(
            f"record {record.id!r} of {record.dataset}: its question is not found verbatim in the prompt rendered by "
            "the model's chat template"
        )
    end = start + len(question)
    encoded = policy.tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    places = [
        index
        for index, (first, last) in enumerate(encoded["offset_mapping"])
        if index > 0 and first < end and last > start and last > first
    ]
    if not places:
        raise DataError(f"record {record.id!r} of {record.dataset}: its question has no token with a predecessor")
    return places
