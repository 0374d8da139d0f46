r"""CoCA in ms-swift: its HF, Megatron and Ray trainers get an advantage for each segment; see docs/frameworks.md.

    swift rlhf --rlhf_type grpo --external_plugins .../coca_plugin.py \
        --reward_funcs coca_correct coca_confidence coca_segment --reward_weights 1 0 0 \
        --loss_type dr_grpo --importance_sampling_level token --beta 0 ...

The environment variable ``COCA`` holds the options as JSON: ``tokenizer``, the model's directory, and the section
``coca`` of docs/verl.md.  ``coca-mindspeed data export swift`` writes the rows, with ``messages`` and ``record``.

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
from typing import Any

import torch
from swift.rewards import ORM, orms
from torch import Tensor
from transformers import AutoTokenizer

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.requirements import Requirement, View
from coca_mindspeed.data.prompts import TemplateKeys, check_end
from coca_mindspeed.errors import CocaError, ConfigError
from coca_mindspeed.integrations.settings import (
    ONE_WEIGHT,
    RowGrader,
    check_options,
    check_prompt,
    check_version,
    integration_settings,
    option_rows,
)
from coca_mindspeed.scoring.rollout import Parsed, Sampled, number_or_none
from coca_mindspeed.utils.tokenization import token_text

TESTED = "==4.6.0"
FUNCTIONS = ("coca_correct", "coca_confidence", "coca_segment")
#: Modules that import the two functions by name.
TRAINERS = tuple(f"swift.{name}.grpo_trainer" for name in ("rlhf_trainers", "megatron.trainers", "ray.megatron"))

check_version("ms-swift", TESTED)
try:
    SECTION = json.loads(os.environ.get("COCA", "{}"))
    TOKENIZER = SECTION.pop("tokenizer")
except (ValueError, AttributeError, KeyError) as error:
    raise ConfigError('set the environment variable COCA=\'{"tokenizer": "DIR"}\' to the model\'s directory') from error
# ms-swift 4.6.0 tells reward functions the step in its HF and Megatron trainers, but not in its Ray trainer.
SETTINGS = integration_settings(SECTION, "ms_swift")
RULE = CreditRule(SETTINGS.method, SETTINGS.stage)
if len(RULE.segments) != 2:
    raise ConfigError(f"coca.method.name={SETTINGS.method.name}: ms-swift trains methods of two segments")


_KEYS = TemplateKeys(
    variables="--enable_thinking false, or a row's chat_template_kwargs",
    thinking="coca.method.thinking",
    day="",
)


_REQUIREMENTS: tuple[Requirement[View], ...] = (
    *option_rows("ms_swift"),
    Requirement(
        "segments",
        "loss_type",
        lambda loss, _: loss not in ("real", "fipo"),
        f"must have a ratio for each token: {ONE_WEIGHT}",
    ),
)


@cache
def row_grader() -> RowGrader:
    return RowGrader(SETTINGS)


class Correct(ORM):
    """1.0 for a right answer, 0.0 for a wrong one, None for one that could not be graded."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        if args is not None:
            check_options(_REQUIREMENTS, args, "options of ms-swift:")

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        for number, messages in enumerate(columns.get("messages", ()), start=1):
            check_prompt(messages[:-1], SETTINGS.method, f"response {number}")
        answers = _read(completions, columns["response_token_ids"]).answers
        verdicts = row_grader().grade(columns.get("record") or [None] * len(answers), answers)
        return [None if verdict is None else float(verdict) for verdict in verdicts]


class Confidence(ORM):
    """The stated confidence; None where there is no valid one."""

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [number_or_none(stated) for stated in _read(completions, columns["response_token_ids"]).stated]


class Segment(ORM):
    """The number of sampled tokens in the first segment."""

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return _read(completions, columns["response_token_ids"]).segment_ends[:, 0].float().tolist()


def _read(completions: Sequence[str], sampled: Sequence[Sequence[int]]) -> Parsed:
    """Read the responses from their sampled ids: ms-swift's texts begin with what its template has put before them."""
    parsed = Sampled.of_responses(sampled).read(_token_text(), SETTINGS.method)
    for completion, text in zip(completions, parsed.texts, strict=True):
        end = completion.rstrip().removesuffix(text.strip())
        check_end(end, "the template of ms-swift", _KEYS, SETTINGS.method.thinking)
    return parsed


@cache
def _token_text() -> TokenText:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return token_text(tokenizer, len(tokenizer))


def compute_advantages(
    rewards_per_func: Tensor, reward_weights: Tensor, num_generations: int, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of both segments, in place of ms-swift's function of this name.

    Args:
        rewards_per_func: float ``[N, 3]`` of all processes, the results of :data:`FUNCTIONS`, NaN for None.
        reward_weights: float ``[3]``, for the metric ``reward`` only.
        num_generations: G, responses to each prompt.
        **_: settings of ms-swift's own estimators; see :func:`_conditions`.

    Returns:
        float ``[N, 3]``: advantage of the first segment, of the second, tokens of the first; and float ``[N]``, the
        weighted sum of the rewards.
    """
    if rewards_per_func.shape[1] != len(FUNCTIONS):
        raise ConfigError(f"expected --reward_funcs {' '.join(FUNCTIONS)}, found {rewards_per_func.shape[1]} functions")
    correct, confidence, segment = rewards_per_func.detach().cpu().view(-1, num_generations, 3).unbind(dim=2)
    credit = RULE(correct, confidence)
    columns = (*(values.flatten() for values in credit.values_by_segment().values()), segment.flatten())
    rewards = (rewards_per_func * reward_weights).nansum(dim=1)
    return torch.stack(columns, dim=1).to(rewards), rewards


def refuse_dynamic_samples(*_: Any, **__: Any) -> None:
    """Refuse responses of several turns; replaces ms-swift's function."""
    raise CocaError("CoCA needs one turn a response: remove --multi_turn_scheduler and dynamic numbers of samples")


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
    first, second, segment = (column[:, None] for column in advantages.unbind(dim=1))
    return torch.where(number <= segment, first, second) * inside


orms.update(zip(FUNCTIONS, (Correct, Confidence, Segment), strict=True))
_MODULES: tuple[Any, ...] = (importlib.import_module("swift.rl_core.advantage"), *map(sys.modules.get, TRAINERS))
for _module in filter(None, _MODULES):
    _module.compute_advantages = compute_advantages
    _module.compute_advantages_dynamic = refuse_dynamic_samples
    _module.expand_advantage_to_per_token = expand_advantage_to_per_token
