"""Assessor: another causal LM, fine-tuned to predict from the question alone whether the subject will be right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coca_mindspeed.baselines.early_stopping import Fit, FitConfig, fit_with_early_stopping
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of

ASSESSOR_PROMPT = (
    "The following question will be put to another language model. Predict whether its answer will be correct. "
    "Reply with 1 if it will be correct and with 0 if it will be wrong, and with nothing else."
)


@dataclass(frozen=True)
class AssessorConfig:
    """How an assessor is read and trained.

    Attributes:
        labels: the texts of the tokens that stand for right and wrong; the confidence is the probability of the first
            among the two.  Every tokenizer that we know has the digits.
        max_prompt_tokens: a longer question is an error.
        fit: how it is trained.
    """

    labels: tuple[str, str] = ("1", "0")
    max_prompt_tokens: int = 2048
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(lr=1e-5, weight_decay=0.0, batch=16, epochs=3, patience=1, validation=0.1)
    )


def bare_questions(records: Sequence[Record]) -> list[Record]:
    """Records without answer instruction and without a system prompt of their own."""
    return [replace(r, system=None, metadata={**r.metadata, "instruction": ""}) for r in records]


class Assessor:
    """A causal LM and the two tokens by which it speaks."""

    def __init__(self, policy: Policy, config: AssessorConfig) -> None:
        """Take ``policy`` as it is.

        Raises:
            ConfigError: a label is not one token of its tokenizer.
        """
        self.policy, self._config = policy, config
        encoded = [policy.tokenizer(label, add_special_tokens=False)["input_ids"] for label in config.labels]
        for label, ids in zip(config.labels, encoded, strict=True):
            if len(ids) != 1:
                raise ConfigError(f"assessor: the label {label!r} should be one token, its tokenizer makes {len(ids)}")
        self._label_ids = [ids[0] for ids in encoded]

    def encode(self, records: Sequence[Record]) -> list[list[int]]:
        """Prompts from the questions alone: no answer instruction, and our system prompt in the place of any other."""
        return self.policy.encode_prompts(bare_questions(records), ASSESSOR_PROMPT, self._config.max_prompt_tokens)

    def logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-odds of "right", ``[n]``, with gradient; one batch."""
        ids, mask = pad_left(prompts, self.policy.pad_id, self.policy.device)
        with self.policy.autocast():
            states = self.policy.lm_head.hidden_states(
                input_ids=ids, attention_mask=mask, position_ids=positions_of(mask, ids), use_cache=False
            )
            last = self.policy.lm_head.logits(states[:, -1])
        right, wrong = self._label_ids
        log_odds: Tensor = last[:, right].float() - last[:, wrong].float()
        return log_odds

    @torch.no_grad()
    def confidence(self, records: Sequence[Record]) -> list[float]:
        """Probability that the subject's answer will be correct, for each record; one batch."""
        result: list[float] = self.logits(self.encode(records)).sigmoid().cpu().tolist()
        return result


def train_assessor(
    policy: Policy,
    records: Sequence[Record],
    correct: Sequence[bool],
    config: AssessorConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Assessor, Fit]:
    """Fine-tune ``policy`` in place on the subject's outcomes.

    Args:
        policy: what becomes the assessor.
        records: the training questions.
        correct: whether the subject's own sample was right, for each.
        config: see :class:`AssessorConfig`.
        seed: draws split and order.
        progress: called after each epoch.
    """
    assessor = Assessor(policy, config)
    prompts = assessor.encode(records)
    fit = fit_with_early_stopping(
        policy.model,
        lambda rows: assessor.logits([prompts[i] for i in rows.tolist()]),
        torch.tensor(correct),
        config.fit,
        seed,
        progress,
    )
    return assessor, fit
