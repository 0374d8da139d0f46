"""CoCA in slime and vime: grading, group credit and token advantages as hooks of the command line; see docs/slime.md.

    python train.py ... --custom-config-path coca.yaml --prompt-data rows.jsonl --input-key prompt --label-key label \
        --apply-chat-template --custom-megatron-init-path coca_mindspeed.integrations.slime.check \
        --custom-rm-path coca_mindspeed.integrations.slime.reward \
        --custom-reward-post-process-path coca_mindspeed.integrations.slime.give_credit \
        --custom-advantage-function-path coca_mindspeed.integrations.slime.token_advantages \
        --custom-pg-loss-reducer-function-path coca_mindspeed.integrations.slime.sum_over_tokens \
        --custom-rollout-log-function-path coca_mindspeed.integrations.slime.log_metrics

``coca.yaml`` holds the section ``coca`` of docs/verl.md, such as ``coca: {method: {advantage_scale: batch}}``.
"""

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.data.prompts import TemplateKeys, check_end
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.integrations.settings import (
    IntegrationSettings,
    RowGrader,
    check_options,
    check_prompt,
    integration_settings,
)
from coca_mindspeed.integrations.slime_requirements import REQUIREMENTS, check_package, package
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.rollout import Credited, Parsed, Sampled, confidence_log_probs, confidences
from coca_mindspeed.utils.gathering import GatheringQueue
from coca_mindspeed.utils.tokenization import token_text

VERDICT = "coca_correct"  # key of Sample.metadata: true, false, or null where the answer could not be graded
logger = logging.getLogger(__name__)
_KEYS = TemplateKeys(variables="--apply-chat-template-kwargs", thinking="coca.method.thinking", day="")
_END = 40  # characters that may open a thought at the end of a rendered prompt
HEALTH = HealthWarnings()  # of the rollouts, which one process makes


def check(args: Any) -> None:
    """``--custom-megatron-init-path``: refuse sources and options that do not fit, before anything is sampled."""
    _checked(args)


def _checked(args: Any) -> IntegrationSettings:
    """The section ``coca`` of ``args``, which are checked at their first use in a process."""
    if not getattr(args, "coca_checked", False):
        check_package(args)
        check_options(REQUIREMENTS, args, "options of slime:")
        args.coca_checked = True
    return _settings(json.dumps(args.coca))


@cache
def _settings(section: str) -> IntegrationSettings:
    return integration_settings(json.loads(section), "slime")


@cache
def _token_text(model: str) -> TokenText:
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    return token_text(tokenizer, len(tokenizer))


@cache
def _queue(loop: asyncio.AbstractEventLoop, model: str, section: str) -> GatheringQueue[Any, bool | None]:
    """Grades the responses that finish close together at once, beside the event loop that samples the others."""
    settings = _settings(section)
    grader = RowGrader(settings)

    def grade(samples: Sequence[Any]) -> list[bool | None]:
        return grader.grade([one.metadata.get("record") for one in samples], _read(model, settings, samples).answers)

    return GatheringQueue(grade, "grading")


def _read(model: str, settings: IntegrationSettings, samples: Sequence[Any]) -> Parsed:
    """Read the sampled ids, which are the last ones of ``tokens``."""
    sampled = Sampled.of_responses(one.tokens[len(one.tokens) - one.response_length :] for one in samples)
    return sampled.read(_token_text(model), settings.method)


async def reward(args: Any, sample: Any, **_: Any) -> float | list[float]:
    """``--custom-rm-path``: 1 for a right answer, else 0, by the record in ``metadata``; a list for a list."""
    if isinstance(sample, list):
        return list(await asyncio.gather(*(reward(args, one) for one in sample)))  # type: ignore[arg-type]
    settings, rendered = _checked(args), isinstance(sample.prompt, str)
    where = f"sample {sample.index}"
    check_prompt([{"content": sample.prompt}] if rendered else sample.prompt, settings.method, where)
    if rendered:
        check_end(sample.prompt[-_END:], where, _KEYS, settings.method.thinking)
    queue = _queue(asyncio.get_running_loop(), args.hf_checkpoint, json.dumps(args.coca))
    sample.metadata[VERDICT] = await queue(sample)
    return float(sample.metadata[VERDICT] is True)


def _verdict(sample: Any) -> float | None:
    """1, 0, or None where ungradable; of another reward function, its reward."""
    verdict = sample.metadata.get(VERDICT, sample.reward)
    if verdict is None or sample.status is type(sample).Status.ABORTED:
        return None
    if isinstance(verdict, dict) or verdict not in (0, 1):
        raise ConfigError(f"sample {sample.index}: expected a reward of 1, 0 or None, found {verdict!r:.80}")
    return float(verdict)


def _credited(args: Any, samples: Sequence[Any]) -> tuple[list[int], Credited]:
    """Give credit to a rollout; the indices are those of the samples, group by group, as the rows are."""
    settings, size = _checked(args), args.n_samples_per_prompt
    groups: dict[Any, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(index)
        if sample.loss_mask is not None and 0 in sample.loss_mask:
            raise DataError(f"sample {sample.index}: tokens of tools or other turns cannot be told from the answer")
    if broken := {group: len(rows) for group, rows in groups.items() if len(rows) != size}:
        raise DataError(f"expected groups of {size} samples with one group_index, found {broken!s:.80}")
    order = [index for rows in groups.values() for index in rows]
    ordered = [samples[index] for index in order]
    scored = _read(args.hf_checkpoint, settings, ordered).scored(confidences(map(_verdict, ordered)))
    rule, log_probs = CreditRule(settings.method, settings.stage or 0), None
    if rule.settings.reads_log_probs:
        if missing := [one.index for one in ordered if len(one.rollout_log_probs or ()) != one.response_length]:
            raise DataError(f"sample {missing[0]}: coca.method.entropy_bonus needs log-probs of its tokens")
        sampled = [torch.tensor(one.rollout_log_probs or [], dtype=torch.float64) for one in ordered]
        log_probs = confidence_log_probs(rule, pad_sequence(sampled, batch_first=True), scored.segment_ends)
    return order, scored.give_credit(rule, size, log_probs=log_probs)


def give_credit(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[torch.Tensor]]:
    """``--custom-reward-post-process-path``: as rewards, the advantages of tokens, float32 ``[T]`` each."""
    order, credited = _credited(args, samples)
    rows = zip(order, credited.token_advantages, credited.scored.lengths.tolist(), strict=True)
    rewards = {index: advantages[:length].clone() for index, advantages, length in rows}
    return [_verdict(sample) or 0.0 for sample in samples], [rewards[index] for index in range(len(samples))]


def token_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """``--custom-advantage-function-path``: the advantages of this rank's samples and its part of each sequence."""
    _checked(args)
    cp_utils = import_module(f"{package()}.backends.megatron_utils.cp_utils")
    columns = (rollout_data[key] for key in ("rewards", "total_lengths", "response_lengths", "kl"))
    advantages = [
        cp_utils.slice_log_prob_with_cp(of_tokens, total, response).to(like)
        for of_tokens, total, response, like in zip(*columns, strict=True)
    ]
    rollout_data["advantages"], rollout_data["returns"] = advantages, list(advantages)
    # slime logs the mean of the numbers here.
    rollout_data["rewards"] = [float(each.mean()) if len(each) else 0.0 for each in rollout_data["rewards"]]


def sum_over_tokens(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any:
    """``--custom-pg-loss-reducer-function-path``: the paper's sum over tokens instead of the mean of each response."""
    cp_utils = import_module(f"{package()}.backends.megatron_utils.cp_utils")
    return cp_utils.get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=True)


def log_metrics(rollout_id: int, args: Any, samples: Sequence[Any], extra: dict[str, Any] | None, _: float) -> bool:
    """``--custom-rollout-log-function-path``: add CoCA's metrics to slime's, which logs them, and warn of problems."""
    metrics = values(rollout_metrics(_credited(args, samples)[1]))
    truncated = [sample.status is type(sample).Status.TRUNCATED for sample in samples]
    metrics["response/cut_off_share"] = sum(truncated) / len(truncated)
    if warning := HEALTH.after_step(rollout_id + 1, metrics, _checked(args).method.training_method):
        logger.warning(warning)
    if extra is not None:
        extra.update({f"rollout/coca/{name}": value for name, value in metrics.items() if not math.isnan(value)})
    return False
