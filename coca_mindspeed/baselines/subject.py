"""The model whose confidence is asked for, how it is prompted, and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.config.schema import MethodConfig, RolloutConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local import prefill as local_prompt_states
from coca_mindspeed.local.experience import predict
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import generator


@dataclass(frozen=True)
class Subject:
    """A model under test.

    Attributes:
        policy: the model; it is never changed.
        grader: says which of its answers are right.
        method: gives the prompt, and the place and width of the verbalised confidence.
        rollout: length limits and how many responses to sample at once.
        seed: draws its answers.
    """

    policy: Policy
    grader: Grader
    method: MethodConfig
    rollout: RolloutConfig
    seed: int

    def generator(self, *purpose: object) -> torch.Generator:
        """Random numbers for one purpose, on the policy's device."""
        return generator(self.policy.device, self.seed, "baseline", *purpose)

    def answers(self, records: Sequence[Record], *purpose: object) -> list[Prediction]:
        """One graded answer at temperature 1 to each record, with the confidence that it states itself."""
        draw = self.generator(*purpose)
        return predict(self.policy, records, self.grader, self.method, self.rollout, draw)


def check_layer(layer: int, config: Any, *, where: str) -> None:
    """Refuse a layer that a model has not; see :func:`prompt_states`.

    Args:
        layer: counted as there.
        config: the model's Hugging Face configuration.
        where: the option that named it.

    Raises:
        UsageError: the model has no such layer.
    """
    layers = int(config.num_hidden_layers) + 1
    if not -layers <= layer < layers:
        raise UsageError(f"{where} {layer}: expected one from {-layers} to {layers - 1}, which the model has")


def prompt_states(subject: Subject, records: Sequence[Record], layer: int) -> Tensor:
    """Hidden states of each prompt's last token, where the answer is about to begin.

    Args:
        subject: the frozen model.
        records: n questions, all in one batch.
        layer: as in :func:`coca_mindspeed.local.prefill.prompt_states`.

    Returns:
        float32 ``[n, hidden]`` on the CPU.

    Raises:
        UsageError: the model has no such layer.
    """
    policy = subject.policy
    check_layer(layer, policy.model.config, where="layer")
    system_prompt = subject.method.training_method.system_prompt
    prompts = policy.encode_prompts(records, system_prompt, subject.rollout.max_prompt_tokens)
    return local_prompt_states.prompt_states(policy, prompts, layer)
