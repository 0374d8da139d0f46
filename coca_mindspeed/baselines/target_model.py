"""The target model of a baseline: its prompt, answers, hidden states, and the probabilities of its questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.config.schema import MethodConfig, RolloutConfig
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, UsageError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of
from coca_mindspeed.local.respond import predict
from coca_mindspeed.local.schedule import generator


@dataclass(frozen=True)
class TargetModel:
    """A target model: ``policy`` is never changed, ``seed`` is of its answers."""

    policy: Policy
    grader: Grader
    method: MethodConfig
    rollout: RolloutConfig
    seed: int

    def generator(self, *purpose: object) -> torch.Generator:
        """Return a random generator for one purpose, on the policy's device."""
        return generator(self.policy.device, self.seed, "baseline", *purpose)

    def answers(self, records: Sequence[Record], *purpose: object, readings: bool = False) -> list[Prediction]:
        """Sample one graded answer at temperature 1 to each record, with its stated confidence; see :func:`predict`."""
        draw = self.generator(*purpose)
        return predict(self.policy, records, self.grader, self.method, self.rollout, draw, readings=readings)


def check_layer(layer: int, config: Any, *, where: str) -> None:
    """Raise UsageError unless the model of this Hugging Face configuration has the layer; ``where`` is the option."""
    layers = int(config.num_hidden_layers) + 1
    if not -layers <= layer < layers:
        raise UsageError(f"{where} {layer}: expected one from {-layers} to {layers - 1}, which the model has")


def prompt_states(target: TargetModel, records: Sequence[Record], layer: int) -> Tensor:
    """Return the hidden states of each prompt's last token: float32 ``[n, hidden]`` on the CPU; one batch.

    ``layer`` 0 is the embedding, i the output of block i, and negative ones count from the last.  Raises UsageError if
    the model has no such layer.
    """
    policy = target.policy
    check_layer(layer, policy.model.config, where="layer")
    prompts = policy.encode_prompts(records, target.method.training_method.system_prompt)
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    with torch.inference_mode(), policy.autocast():
        output = policy.lm_head.body(
            input_ids=ids,
            attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
            position_ids=positions_of(mask, ids),
            output_hidden_states=True,
            use_cache=False,
        )
    states: Tensor = output.hidden_states[layer][:, -1].float().cpu()
    return states.clone()  # inference tensors cannot enter a graph


# Replaces the user's message to find the template's own text.
_SENTINEL = "7f3aquestion0c55"


def question_probabilities(target: TargetModel, records: Sequence[Record]) -> list[float]:
    """Return the question probability of each record (paper, section 4.1), in [0, 1]; one batch.

    It is the mean of P(x_i | x_<i) over the tokens with a character of the question, but the first token of the text;
    system prompt, answer instruction and template are context only.

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
