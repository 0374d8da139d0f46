"""Assessor: another causal LM, fine-tuned to predict from the question whether the target model answers correctly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coca_mindspeed.baselines.early_stopping import Fit, FitConfig, fit_with_early_stopping
from coca_mindspeed.baselines.inputs import ASSESSOR_PROMPT, bare_questions
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of


@dataclass(frozen=True)
class AssessorConfig:
    """Settings of an assessor; its confidence is the probability of the first of two single-token ``labels``."""

    labels: tuple[str, str] = ("1", "0")
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(lr=1e-5, weight_decay=0.0, batch=16, epochs=3, patience=1, validation=0.1)
    )


class Assessor:
    """A causal LM whose two label tokens predict correctness."""

    def __init__(self, policy: Policy, config: AssessorConfig) -> None:
        """Raises ConfigError if a label is not a single token."""
        self.policy, self._config = policy, config
        encoded = [policy.tokenizer(label, add_special_tokens=False)["input_ids"] for label in config.labels]
        for label, ids in zip(config.labels, encoded, strict=True):
            if len(ids) != 1:
                raise ConfigError(f"assessor: the label {label!r} should be one token, its tokenizer makes {len(ids)}")
        self._label_ids = [ids[0] for ids in encoded]

    def encode(self, records: Sequence[Record]) -> list[list[int]]:
        """Encode the questions, without answer instruction, under the assessor's own system prompt."""
        return self.policy.encode_prompts(bare_questions(records), ASSESSOR_PROMPT)

    def logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-odds of a correct answer, ``[n]``, with gradient; one batch."""
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
        """Probability of a correct answer for each record; one batch."""
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
    """Fine-tune ``policy`` in place on the target model's verdicts ``correct`` for ``records``.

    ``seed`` draws the validation split and the order; ``progress`` is called after each epoch.
    """
    assessor = Assessor(policy, config)
    prompts = assessor.encode(records)

    def logits_of(rows: Tensor) -> Tensor:
        return assessor.logits([prompts[i] for i in rows.tolist()])

    labels = torch.tensor(correct)
    return assessor, fit_with_early_stopping(policy.model, logits_of, labels, config.fit, seed, progress)
