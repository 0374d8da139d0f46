"""CoCA for a training loop of one's own: from sampled token ids and verdicts to token advantages.

The names are re-exported by :mod:`coca_mindspeed`; docs/library.md shows a loop that uses them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import Reduce, SegmentMasks
from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import Credit, CreditRule
from coca_mindspeed.algorithm.methods import MethodSettings, method_settings
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.rollout import Sampled, confidence_log_probs
from coca_mindspeed.utils.tokenization import token_text


@dataclass(frozen=True, slots=True)
class CocaAdvantages:
    """Result of :func:`coca_advantages` for ``B = P * G`` responses of ``T`` tokens.

    Attributes:
        advantages: float32 ``[B, T]``, the advantage of each token, 0 on padding; on the device of the token ids.
        masks: bool ``[B, T]`` each, the tokens of each segment by its name (``confidence``, ``answer``), in the order
            of the response; on the same device.
        confidences: float64 ``[B]``, the stated confidences, NaN where the response is invalid; on the CPU.
        answers: the answer segment of each response; of an invalid one, the whole text.
        credit: rewards, GESR and advantages by group; on the CPU.
        metrics: ``rollout/ece``, ``rollout/gesr``, ``reward/confidence`` and the other metrics of a batch, by the names
            of docs/troubleshooting.md; NaN where undefined.
    """

    advantages: Tensor
    masks: SegmentMasks
    confidences: Tensor
    answers: list[str]
    credit: Credit
    metrics: dict[str, float]


def coca_advantages(
    token_ids: Tensor,
    lengths: Tensor,
    correct: Tensor | Sequence[bool | None],
    tokenizer: Any,
    group_size: int,
    *,
    method: str | MethodSettings = "coca",
    stage: int | None = None,
    log_probs: Tensor | None = None,
    reduce: Reduce | None = None,
) -> CocaAdvantages:
    """Compute the advantage of each sampled token from the verdicts on the answers.

    The confidences are read from the sampled ids themselves, through the bytes of each token; nothing is tokenised
    again.  Feed the result to :func:`segment_objective`, or ``advantages`` to any policy loss that takes ``[B, T]``.

    Args:
        token_ids: int ``[B, T]``, the sampled responses without their prompts, padded on the right with anything.  The
            responses to one prompt follow each other: row ``p * group_size + g`` is response g to prompt p.
        lengths: int ``[B]``, tokens of each response, the end-of-text token included.
        correct: whether each answer is right: a sequence of True, False and None, a bool tensor ``[B]``, or a float
            tensor of 1, 0 and NaN.  None and NaN: the answer could not be graded, and the response is left out of its
            group; a group with fewer than two others gets the advantage 0.
        tokenizer: the model's fast Hugging Face tokenizer, or its :func:`token_text`.
        group_size: G, responses to each prompt, at least 2.
        method: a name of docs/method.md, such as ``coca``, or :func:`method_settings` with keys of that page, or of an
            object with the methods of :class:`TrainingMethod`.
        stage: index into the method's stages, which are run one after the other; None: it has only one.
        log_probs: float ``[B, T]``, for settings that read them (``entropy_bonus``): of each sampled token under the
            policy that sampled it, anything on padding; without gradient.
        reduce: with the scale ``batch`` in several processes, adds (sum of squares, count) over all of them; every
            process calls it equally often.

    Raises:
        ValueError: a wrong shape, an unknown method or stage, B that is no multiple of ``group_size``, or no log-probs
            for settings that read them.
        TypeError: token ids or lengths that are no integer tensors.
        ConfigError: the tokenizer is slow, or has no bytes for each token.
    """
    for name, tensor in (("token_ids", token_ids), ("lengths", lengths)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} should be an int tensor, found {type(tensor).__name__}; pad lists into a tensor")
    if token_ids.dim() != 2:
        raise ValueError(f"token_ids should be int [B, T], found shape {list(token_ids.shape)}")
    batch, width = token_ids.shape
    if group_size < 2 or batch == 0 or batch % group_size:
        raise ValueError(
            f"the batch should hold whole groups of at least 2 responses, found {batch} responses and "
            f"group_size {group_size}"
        )
    settings = method_settings(method) if isinstance(method, str) else method
    rule = CreditRule(settings, stage)
    if settings.reads_log_probs and (log_probs is None or log_probs.shape != token_ids.shape):
        shape = "none" if log_probs is None else list(log_probs.shape)
        raise ValueError(
            f"the settings of {settings.label} need log_probs, float {list(token_ids.shape)}; found {shape}"
        )
    ids, ends = token_ids.detach().cpu(), lengths.detach().cpu()
    if ends.shape != (batch,):
        raise ValueError(f"lengths should be int [{batch}], found shape {list(ends.shape)}")
    ids = ids.where(torch.arange(width) < ends[:, None], 0)  # padding such as -100 is no token
    sampled_ids, text = Sampled(token_ids=ids, lengths=ends), _token_text(tokenizer, ids)
    parsed = sampled_ids.read(text, settings)
    scored = parsed.scored(_verdicts(correct, batch))
    sampled = None if log_probs is None else log_probs.detach().cpu()
    of_confidence = confidence_log_probs(rule, sampled, scored.segment_ends)
    credited = scored.give_credit(rule, group_size, reduce, log_probs=of_confidence, width=width)
    return CocaAdvantages(
        advantages=credited.token_advantages.to(token_ids.device),
        masks={name: mask.to(token_ids.device) for name, mask in credited.masks.items()},
        confidences=parsed.stated,
        answers=list(parsed.answers),
        credit=credited.credit,
        metrics=values(rollout_metrics(credited)),
    )


def _verdicts(correct: Tensor | Sequence[bool | None], batch: int) -> Tensor:
    """Verdicts as float64 ``[B]`` on the CPU, NaN where ungradable."""
    if not isinstance(correct, Tensor):
        if wrong := [verdict for verdict in correct if not isinstance(verdict, bool | np.bool_ | None)]:
            raise ValueError(
                f"correct should hold True, False or None, found {wrong[0]!r}; compare rewards, as in "
                "[reward == 1 for reward in rewards]"
            )
        correct = torch.tensor([math.nan if verdict is None else float(verdict) for verdict in correct])
    if correct.shape != (batch,) or not (correct.dtype == torch.bool or correct.dtype.is_floating_point):
        raise ValueError(f"correct should be bool or float [{batch}], found {correct.dtype} {list(correct.shape)}")
    return correct.detach().cpu().double()


# A table takes about a second to make for 150,000 tokens, so it is kept for as long as its tokenizer.
_TABLES: WeakKeyDictionary[Any, tuple[int, TokenText]] = WeakKeyDictionary()


def _token_text(tokenizer: Any, token_ids: Tensor) -> TokenText:
    """The bytes of each id; rows of the model's output layer beyond the tokenizer's vocabulary have none."""
    if isinstance(tokenizer, TokenText):
        return tokenizer
    known, highest = len(tokenizer), int(token_ids.max()) if token_ids.numel() else 0
    made_for, table = _TABLES.get(tokenizer, (0, None))
    if table is None or made_for != known or table.vocabulary_size <= highest:
        table = token_text(tokenizer, highest + 1)
        _TABLES[tokenizer] = (known, table)
    return table
