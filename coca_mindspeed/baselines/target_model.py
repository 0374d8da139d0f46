"""The target model of a baseline: its prompt, its answers and its hidden states."""

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
from coca_mindspeed.local.policy import Policy
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

    ``layer`` counts as in :func:`coca_mindspeed.local.prefill.prompt_states`.

    Raises:
        UsageError: the model has no such layer.
    """
    policy = target.policy
    check_layer(layer, policy.model.config, where="layer")
    system_prompt = target.method.training_method.system_prompt
    prompts = policy.encode_prompts(records, system_prompt)
    return local_prompt_states.prompt_states(policy, prompts, layer)
