"""Estimates of a target model's probability to answer correctly: question probability, probe and assessor.

The probe is a two-layer MLP on the frozen target model's hidden states before generation (arXiv 2602.09924, where it is
linear).  The assessor is another causal LM, fine-tuned to predict from the question whether the target model answers
correctly.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.baselines import ASSESSOR_PROMPT, bare_questions
from coca_mindspeed.config.schema import RolloutConfig
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of
from coca_mindspeed.local.respond import predict
from coca_mindspeed.local.schedule import generator
from coca_mindspeed.utils.files import whole_directory
from coca_mindspeed.utils.json_files import write_json


@dataclass(frozen=True)
class TargetModel:
    """The model under test: ``policy`` is never changed, ``seed`` is of its answers."""

    policy: Policy
    grader: Grader
    method: MethodSettings
    rollout: RolloutConfig
    seed: int

    def generator(self, *purpose: object) -> torch.Generator:
        """Return a random generator for one purpose, on the policy's device."""
        return generator(self.policy.device, self.seed, "baseline", *purpose)

    def answers(self, records: Sequence[Record], *purpose: object) -> list[Prediction]:
        """Sample one graded answer at temperature 1 to each record; see :func:`predict`.

        It has its stated confidence, its tokens and the probability of its answer.
        """
        draw = self.generator(*purpose)
        return predict(self.policy, records, self.grader, self.method, self.rollout, draw, probabilities=True)


def check_layer(layer: int, config: Any, *, where: str) -> None:
    """Raise UsageError unless the model of this Hugging Face configuration has the layer; ``where`` is the option."""
    layers = int(config.num_hidden_layers) + 1
    if not -layers <= layer < layers:
        raise UsageError(f"{where} {layer}: expected one from {-layers} to {layers - 1}, which the model has")


def prompt_states(target: TargetModel, records: Sequence[Record], layer: int, batch: int) -> Tensor:
    """Return the hidden states of each prompt's last token: float32 ``[n, hidden]`` on the CPU, ``batch`` at once.

    ``layer`` 0 is the embedding, i the output of block i, and negative ones count from the last.
    """
    chunks = (records[start : start + batch] for start in range(0, len(records), batch))
    return torch.cat([_batch_states(target, chunk, layer) for chunk in chunks])


def _batch_states(target: TargetModel, records: Sequence[Record], layer: int) -> Tensor:
    policy = target.policy
    prompts = policy.encode_prompts(records, target.method.system_prompt)
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


def _last_states(policy: Policy, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The ids ``[n, t]`` of left-padded prompts and the last layer's states ``[n, t, hidden]``."""
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    states: Tensor = policy.lm_head.hidden_states(
        input_ids=ids, attention_mask=mask, position_ids=positions_of(mask, ids), use_cache=False
    )
    return ids, states


# Replaces the user's message to find the template's own text.
_SENTINEL = "7f3aquestion0c55"


def question_probabilities(target: TargetModel, records: Sequence[Record]) -> list[float]:
    """Return the question probability of each record (paper, section 4.1), in [0, 1]; one batch.

    It is the mean of P(x_i | x_<i) over the tokens with a character of the question, but the first token of the text;
    system prompt, answer instruction and template are context only.

    Raises DataError if a question cannot be found in its prompt.
    """
    policy, system_prompt = target.policy, target.method.system_prompt
    prompts = policy.encode_prompts(records, system_prompt)
    places = [question_tokens(policy, record, system_prompt) for record in records]
    with torch.inference_mode(), policy.autocast():
        ids, states = _last_states(policy, prompts)
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
            f"{record.name}: its question is not found verbatim in the prompt rendered by the model's chat template"
        )
    end = start + len(question)
    encoded = policy.tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    places = [
        index
        for index, (first, last) in enumerate(encoded["offset_mapping"])
        if index > 0 and first < end and last > start and last > first
    ]
    if not places:
        raise DataError(f"{record.name}: its question has no token with a predecessor")
    return places


_MIN_EXAMPLES = 10


@dataclass(frozen=True)
class FitConfig:
    """AdamW with early stopping: ``validation`` is the held-out fraction, ``patience`` in epochs without progress."""

    lr: float = 1e-3
    weight_decay: float = 1e-2
    batch: int = 256
    epochs: int = 100
    patience: int = 8
    validation: float = 0.2


@dataclass(frozen=True)
class Fit:
    """Validation losses (nats) by epoch, the first one before training, and the best epoch."""

    losses: list[float]
    best_epoch: int


def fit_with_early_stopping(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    labels: Tensor,
    config: FitConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Fit:
    """Minimise the cross-entropy of ``labels`` (bool ``[n]``) in place; the weights of the best epoch are kept.

    ``logits_of`` maps indices int64 ``[b]`` of examples to logits ``[b]``, with gradient.  ``seed`` draws the
    validation split and the order; ``progress`` is called after each epoch with its number and the validation loss.

    Raises DataError: fewer than ten examples.
    """
    n = len(labels)
    if n < _MIN_EXAMPLES:
        raise DataError(f"a predictor of correctness needs at least {_MIN_EXAMPLES} answered questions, found {n}")
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=random)
    held_out, rest = order.tensor_split([max(1, round(n * config.validation))])
    targets = labels.float()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)

    def validation_loss() -> float:
        with torch.no_grad():
            logits = torch.cat([logits_of(part).float().cpu() for part in held_out.split(config.batch)])
        return float(binary_cross_entropy_with_logits(logits, targets[held_out]))

    losses = [validation_loss()]
    best, best_epoch = copy.deepcopy(model.state_dict()), 0
    for epoch in range(1, config.epochs + 1):
        for part in rest[torch.randperm(len(rest), generator=random)].split(config.batch):
            logits = logits_of(part)
            loss = binary_cross_entropy_with_logits(logits.float(), targets[part].to(logits.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(validation_loss())
        progress(epoch, losses[-1])
        if losses[-1] < losses[best_epoch]:
            best, best_epoch = copy.deepcopy(model.state_dict()), epoch
        elif epoch - best_epoch >= config.patience:
            break
    model.load_state_dict(best)
    return Fit(losses, best_epoch)


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of a probe with ``width`` hidden units; ``layer`` as in :func:`prompt_states`."""

    layer: int = -1
    width: int = 128
    fit: FitConfig = field(default_factory=FitConfig)


class Probe(nn.Module):
    """``sigmoid(W2 gelu(W1 z + b1) + b2)`` of standardised hidden states z."""

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, width: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("scale", torch.ones(hidden_size))
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[n]`` of correctness from hidden states, float32 ``[n, hidden]``."""
        inner = nn.functional.gelu(self.inner((states - self.mean) / self.scale))
        logits: Tensor = self.outer(inner).squeeze(-1)
        return logits

    @torch.no_grad()
    def confidence(self, states: Tensor) -> Tensor:
        """Probability ``[n]`` of a correct answer."""
        return self.forward(states).sigmoid()


def train_probe(
    states: Tensor,
    correct: Tensor,
    config: ProbeConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Probe, Fit]:
    """Train a probe on ``states`` float32 ``[n, hidden]`` and ``correct`` bool ``[n]``.

    ``seed`` draws weights, split and order; the global random state is not used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(states.shape[1], config.width, config.layer)
    probe.mean.copy_(states.mean(dim=0))
    probe.scale.copy_(states.std(dim=0, correction=0).clamp(min=1e-6))
    fit = fit_with_early_stopping(probe, lambda rows: probe(states[rows]), correct, config.fit, seed, progress)
    return probe, fit


def save_probe(probe: Probe, fit: Fit, directory: Path) -> None:
    """Write ``probe.safetensors`` and ``probe.json`` atomically."""
    shape = {"hidden_size": len(probe.mean), "width": len(probe.inner.bias), "layer": probe.layer}
    with whole_directory(directory) as writing:
        write_json(writing / "probe.json", {**shape, "fit": asdict(fit)})
        save_file(probe.state_dict(), writing / "probe.safetensors")


def load_probe(directory: Path) -> Probe:
    """Read a probe; raises DataError if the directory holds none, or it is damaged."""
    try:
        shape = json.loads((directory / "probe.json").read_text(encoding="utf-8"))
        probe = Probe(shape["hidden_size"], shape["width"], shape["layer"])
        probe.load_state_dict(load_file(directory / "probe.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{directory}: does not hold a probe that can be read: {error}") from error
    return probe


ASSESSOR_FIT = FitConfig(lr=1e-5, weight_decay=0.0, batch=16, epochs=3, patience=1, validation=0.1)


class Assessor:
    """A causal LM; its confidence is the probability of the first of two single-token labels."""

    def __init__(
        self, policy: Policy, labels: tuple[str, str] = ("1", "0"), system_prompt: str = ASSESSOR_PROMPT
    ) -> None:
        """Raises ConfigError if a label is not a single token."""
        self.policy, self.system_prompt = policy, system_prompt
        encoded = [policy.tokenizer(label, add_special_tokens=False)["input_ids"] for label in labels]
        for label, ids in zip(labels, encoded, strict=True):
            if len(ids) != 1:
                raise ConfigError(f"assessor: the label {label!r} should be one token, its tokenizer makes {len(ids)}")
        self._label_ids = [ids[0] for ids in encoded]

    def encode(self, records: Sequence[Record]) -> list[list[int]]:
        """Encode the questions, without answer instruction, under the assessor's own system prompt."""
        return self.policy.encode_prompts(bare_questions(records), self.system_prompt)

    def logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-odds of a correct answer, ``[n]``, with gradient; one batch."""
        with self.policy.autocast():
            last = self.policy.lm_head.logits(_last_states(self.policy, prompts)[1][:, -1])
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
    config: FitConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Assessor, Fit]:
    """Fine-tune ``policy`` in place on the target model's verdicts ``correct`` for ``records``.

    ``seed`` draws the validation split and the order; ``progress`` is called after each epoch.
    """
    assessor = Assessor(policy)
    prompts = assessor.encode(records)

    def logits_of(rows: Tensor) -> Tensor:
        return assessor.logits([prompts[i] for i in rows.tolist()])

    labels = torch.tensor(correct)
    return assessor, fit_with_early_stopping(policy.model, logits_of, labels, config, seed, progress)
