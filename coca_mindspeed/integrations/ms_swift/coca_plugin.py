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
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from swift.rewards import ORM, orms
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.data.prompts import TemplateKeys, check_no_open_thought
from coca_mindspeed.errors import CocaError, Condition, ConfigError, as_check, find_problems, raise_problems
from coca_mindspeed.integrations.settings import RowGrader, check_prompt, check_version, integration_settings
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
    allow_open_thinking="coca.allow_open_thinking",
    day="",
)


def _conditions(args: Any) -> Iterator[Condition]:
    def value(name: str) -> Any:
        return getattr(args, name, None)

    one_ratio = "one ratio for a whole response gives each of its tokens the gradient of both segments"
    yield "segments", "importance_sampling_level", value("importance_sampling_level") == "token", "token", one_ratio
    one_weight = "one weight for a whole response scales the confidence's tokens by the answer's"
    by_token, mode = (None, "token_truncate", "token_mask"), "rollout_importance_sampling_mode"
    yield "segments", mode, value(mode) in by_token, "token_truncate, token_mask or not set", one_weight
    mixing = value("loss_type") in ("real", "fipo")
    yield "segments", "loss_type", not mixing, "a loss with a ratio for each token", one_weight
    one_mask = "it decides by the log-probs of the whole response which tokens of a segment are trained"
    mask = "off_policy_sequence_mask_delta"
    yield "segments", mask, value(mask) is None, "not set", one_mask
    by_entropy = "it decides by the entropies of all tokens of the batch whether a confidence is trained"
    yield "segments", "top_entropy_quantile", value("top_entropy_quantile") in (None, 1), "1.0, the default", by_entropy
    one_mean = "Liger's loss takes the mean of a response's advantages"
    yield "segments", "use_liger_kernel", not value("use_liger_kernel"), "false", one_mean
    all_equal = "groups whose answers are all right, or all wrong, train the confidence too"
    yield "groups", "dynamic_sample", not value("dynamic_sample"), "false", all_equal
    own_scale = 'the scale of CoCA\'s advantages is COCA=\'{"method": {"advantage_scale": ...}}\''
    yield "scale", "scale_rewards", value("scale_rewards") in (None, "group"), "not set", own_scale
    own = "advantages are CoCA's alone"
    yield "estimator", "advantage_estimator", value("advantage_estimator") == "grpo", "grpo, the default", own
    yield "estimator", "advantage_reweight", value("advantage_reweight") is None, "not set", own
    yield "estimator", "kl_in_reward", not value("kl_in_reward"), "false", own


@cache
def row_grader() -> RowGrader:
    return RowGrader(SETTINGS)


class Correct(ORM):
    """1.0 for a right answer, 0.0 for a wrong one, None for one that could not be graded."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        if args is not None:
            raise_problems(find_problems(args, [as_check(_conditions)]), "options of ms-swift:")

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
    ids = pad_sequence([torch.tensor(each, dtype=torch.int64) for each in sampled], batch_first=True)
    responses = Sampled(token_ids=ids, lengths=torch.tensor(list(map(len, sampled))))
    parsed = responses.read(_token_text(), SETTINGS.method.parser(), SETTINGS.method.max_confidence_tokens)
    if not SETTINGS.allow_open_thinking:
        for completion, text in zip(completions, parsed.texts, strict=True):
            check_no_open_thought(completion.rstrip().removesuffix(text.strip()), "the template of ms-swift", _KEYS)
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
