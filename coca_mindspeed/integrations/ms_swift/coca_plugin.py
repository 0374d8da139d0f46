r"""CoCA in ms-swift, as an external plugin: its HF, Megatron and Ray trainers get an advantage for each segment.

    swift rlhf --rlhf_type grpo --external_plugins examples/ms_swift_coca.py \
        --reward_funcs coca_correct coca_confidence coca_segment --reward_weights 1 0 0 \
        --loss_type dr_grpo --importance_sampling_level token --beta 0 ...

Each row of the data set has ``messages`` that begin with the system prompt of the method, and the fields of a record:
``answer``, and ``category`` and ``metadata`` where the grader needs them.  ``dr_grpo`` is the paper's sum over tokens
up to a constant factor.  The environment variable ``COCA`` holds the options as JSON: ``{"tokenizer": "models/mine"}``.

ms-swift computes one number for each response from the rewards ``[N, functions]``, and later spreads it over the
tokens.  The plugin replaces both functions: the first returns three numbers for each response, the advantages of its
two segments and the length of the first one; the second puts the advantages on the tokens.  It needs the sampled ids,
so ``--template_backend`` is ``swift``: with ``jinja``, ms-swift 4.6.0 trains on other tokens than it sampled.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import swift
import torch
from swift.rewards import ORM, orms
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from coca_mindspeed import CreditRule, confidence_segment_lengths, parse_response, token_text, training_method
from coca_mindspeed.data.records import record_from_json
from coca_mindspeed.errors import CocaError
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.upstream.fingerprint import fingerprint

FUNCTIONS = ("coca_correct", "coca_confidence", "coca_segment")
#: tokenizer: the model's directory (required); method: coca, rlvr, joint or rlcr; decimals: digits of a confidence, or
#: None; eps: added to the standard deviation; grader and grader_options: docs/grading.md.
OPTIONS: dict[str, Any] = {
    "tokenizer": None,
    "method": "coca",
    "decimals": None,
    "eps": 1e-6,
    "grader": "auto",
    "grader_options": {},
    **json.loads(os.environ.get("COCA", "{}")),
}
#: Definitions that the plugin replaces or relies on, with the first digits of their fingerprints in 4.6.0.
FINGERPRINTS = {
    "swift.rl_core.advantage:compute_advantages": "2177eb73653c",
    "swift.rl_core.advantage:expand_advantage_to_per_token": "678532829069",
    "swift.rl_core.grpo_algorithm:compute_rewards_per_func": "fd5e14ccd1c4",
    "swift.rlhf_trainers.grpo_trainer:GRPOTrainer._postprocess_batch": "cbffad82f469",
    "swift.rlhf_trainers.grpo_trainer:GRPOTrainer._compute_advantages": "812cce8103a4",
    "swift.megatron.trainers.grpo_trainer:MegatronGRPOTrainer._compute_advantages": "08be0a292282",
    "swift.ray.megatron.grpo_trainer:GRPOTrainer._scatter_advantages": "eada3e9701c4",
}
#: Modules that import the two functions by name.
TRAINERS = tuple(f"swift.{name}.grpo_trainer" for name in ("rlhf_trainers", "megatron.trainers", "ray.megatron"))


def check_swift(packages: Path = Path(swift.__file__).parents[1]) -> None:
    """Check that ms-swift is the version that this plugin was written for.

    Args:
        packages: the directory that holds ``swift/``.

    Raises:
        CocaError: a definition differs.
    """
    for target, expected in FINGERPRINTS.items():
        if (found := fingerprint(packages, target)[:12]) != expected:
            raise CocaError(
                f"{target} of ms-swift {swift.__version__} in {packages} has the fingerprint {found}, expected "
                f"{expected} of 4.6.0: install ms-swift==4.6.0, or compare the two and update FINGERPRINTS"
            )


@cache
def grader() -> Any:
    return build_grader(OPTIONS["grader"], OPTIONS["grader_options"])


class Correct(ORM):  # type: ignore[misc]
    """1.0 for a right answer, 0.0 for a wrong one, None for one that could not be graded."""

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        records, answers = [], []
        for number, text in enumerate(completions):
            row = {k: columns[k][number] for k in ("answer", "category", "metadata") if columns.get(k)}
            question = columns["messages"][number][-2]["content"]
            records.append(record_from_json({"question": question, **row}, f"sample {number}", "ms-swift", number))
            answers.append(_parsed(text).answer)
        return [
            None if (verdict := given.correct_or_none) is None else float(verdict)
            for given in grader().grade(records, answers)
        ]


class Confidence(ORM):  # type: ignore[misc]
    """The stated confidence; None where there is no valid one."""

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [_parsed(text).confidence for text in completions]


class Segment(ORM):  # type: ignore[misc]
    """The number of sampled tokens in the confidence segment; 0 for an answer-first method."""

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        ids = [torch.tensor(sampled) for sampled in columns["response_token_ids"]]
        valid = torch.tensor([_parsed(text).confidence is not None for text in completions])
        table = _token_text(OPTIONS["tokenizer"])
        lengths = torch.tensor([len(sampled) for sampled in ids])
        found = confidence_segment_lengths(pad_sequence(ids, batch_first=True), lengths, table, valid)
        rule = CreditRule(training_method(OPTIONS["method"]))
        return [float(length) for length in rule.segment_lengths(found)]


def _parsed(text: str) -> Any:
    position = training_method(OPTIONS["method"]).confidence_position
    return parse_response(text, position=position, decimals=OPTIONS["decimals"])


@cache
def _token_text(directory: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return token_text(tokenizer, len(tokenizer))


def compute_advantages(
    rewards_per_func: Tensor, reward_weights: Tensor, num_generations: int, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of both segments, in place of ms-swift's function of this name.

    Args:
        rewards_per_func: float ``[N, 3]``, what :data:`FUNCTIONS` returned, NaN for None.
        reward_weights: float ``[3]``, for the metric ``reward`` only.
        num_generations: G, responses to each prompt.
        **_: settings of ms-swift's own estimators, without effect.

    Returns:
        float ``[N, 3]``: advantage of the confidence segment, of the answer segment, length of the confidence segment;
        and float ``[N]``, the weighted sum of the rewards.
    """
    if rewards_per_func.shape[1] != len(FUNCTIONS):
        raise ValueError(f"expected --reward_funcs {' '.join(FUNCTIONS)}, found {rewards_per_func.shape[1]} functions")
    correct, confidence, segment = rewards_per_func.detach().cpu().view(-1, num_generations, 3).unbind(dim=2)
    credit = CreditRule(training_method(OPTIONS["method"]), eps=OPTIONS["eps"])(correct, confidence)
    columns = (credit.confidence.values.flatten(), credit.answer.values.flatten(), segment.flatten())
    rewards = (rewards_per_func * reward_weights).nansum(dim=1)
    return torch.stack(columns, dim=1).to(rewards), rewards


def expand_advantage_to_per_token(advantages: Tensor, completion_mask: Tensor, **teacher: Any) -> Tensor:
    """Put the advantages on the tokens, in place of ms-swift's function of this name.

    Args:
        advantages: float ``[B, 3]`` of :func:`compute_advantages`.
        completion_mask: ``[B, T]``, true on the tokens of the response.
        **teacher: must be None or 0; distillation is not supported.

    Returns:
        float ``[B, T]``, 0 outside of the response.
    """
    if any(value is not None and value != 0 for value in teacher.values()):
        raise CocaError("CoCA cannot be combined with a teacher: remove the teacher's options")
    inside = completion_mask.bool()
    number = inside.cumsum(dim=1)  # the first token of the response has number 1
    confidence, answer, segment = (column[:, None] for column in advantages.unbind(dim=1))
    return torch.where(number <= segment, confidence, answer) * inside


def install() -> None:
    """Register the reward functions and replace ms-swift's two functions wherever they are imported."""
    check_swift()
    if OPTIONS["tokenizer"] is None:
        raise CocaError('set the environment variable COCA=\'{"tokenizer": "DIR"}\' to the directory of the model')
    orms.update(zip(FUNCTIONS, (Correct, Confidence, Segment), strict=True))
    modules = [importlib.import_module("swift.rl_core.advantage"), *filter(None, map(sys.modules.get, TRAINERS))]
    for module in modules:
        for function in (compute_advantages, expand_advantage_to_per_token):
            setattr(module, function.__name__, function)


install()
