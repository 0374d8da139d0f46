"""A step of verl's done again by the local engine, from the rows that verl trained on and the same weights.

Only tokens, old log-probs and what was found in each response are taken over; credit and objective are computed anew.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.algorithm.parsing import SEGMENTS
from coca_mindspeed.scoring.rollout import Scored, confidence_log_probs, confidences
from tests.integration.verl import tiny
from tests.local.models_for_tests import response_log_probs


def gradient_norms(
    model: Path, rows: Sequence[Mapping[str, Any]], method: MethodSettings, *, ranks: int, minibatches: int, group: int
) -> tuple[list[float], float]:
    """The gradient's norm at each update of the first step, and the largest difference of an advantage from verl's.

    Args:
        model: the weights that the step began with.
        rows: of the step, in verl's order: a rank's rows stand together, and it cuts its mini-batches from them.
        method: with the aggregation.
        ranks: data-parallel ranks.
        minibatches: updates of the step.
        group: G; a question with fewer responses teaches nothing.
    """
    policy, segments = tiny.load_tiny(model), SEGMENTS[method.training_method.confidence_position]
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    lengths = torch.tensor([len(row["responses"]) for row in rows])
    real = torch.tensor([not row["key"].startswith("pad") for row in rows])
    token_ids = pad_sequence([row["responses"] for row in rows], batch_first=True, padding_value=policy.pad_id)
    old = pad_sequence([row["old_log_probs"] for row in rows], batch_first=True)
    width = token_ids.shape[1]
    advantages, ends = credit(rows, method, group)
    weighted = advantages
    if "rollout_is_weights" in rows[0]:
        weighted = advantages * pad_sequence([row["rollout_is_weights"] for row in rows], batch_first=True)
    norms = []
    for minibatch in range(minibatches):
        chosen = torch.cat([part.chunk(minibatches)[minibatch] for part in torch.arange(len(rows)).chunk(ranks)])
        trained = torch.where(real[chosen], lengths[chosen], 0)
        log_probs = response_log_probs(
            policy,
            [rows[row]["prompts"].tolist() for row in chosen.tolist()],
            token_ids[chosen],
            temperature=1.0,
            share_prompts=False,
        )
        objective = segment_objective(
            log_probs,
            old[chosen],
            weighted[chosen],
            segment_masks(ends[chosen], segments, width),
            clip=method.clip,
            aggregation=method.loss_aggregation,
            responses=len(chosen),
            tokens=int(trained.sum()),
        )
        objective.loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    theirs = pad_sequence([row["advantages"] for row in rows], batch_first=True)
    return norms, float((advantages - theirs).abs().max())


def credit(
    rows: Sequence[Mapping[str, Any]], method: MethodSettings, group: int, *, sampled: str = "old_log_probs"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages ``[rows, T]`` and ends of the segments ``[rows, S]``; ``sampled`` names the bonus's log-probs."""
    lengths = torch.tensor([len(row["responses"]) for row in rows])
    width = int(lengths.max())
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if not row["key"].startswith("pad"):
            groups.setdefault(row["key"].split("_")[0], []).append(index)
    order = torch.tensor([index for each in groups.values() if len(each) == group for index in each])
    chosen = [rows[index] for index in order.tolist()]
    stated = [confidences(row["prediction"]["confidence"] for row in chosen)]
    if len(chosen[0]["stated_confidence"]) == 2:
        stated.append(confidences(row["stated_confidence"][1] for row in chosen))
    graded = {"right": 1.0, "wrong": 0.0, "ungradable": math.nan}
    columns = {
        "stated_confidence": torch.stack(stated, dim=1),
        "correct": torch.tensor([[graded[row["verdict"]]] for row in chosen]),
        "confidence_length": torch.tensor([row["confidence_length"] for row in chosen]),
        "segment_ends": torch.tensor([row["segment_ends"] for row in chosen]),
    }
    scored, rule = Scored.from_columns(columns), CreditRule(method, 0)
    log_probs = pad_sequence([row[sampled] for row in chosen], batch_first=True)
    of_confidence = confidence_log_probs(rule, log_probs, scored.segment_ends)
    credited = scored.give_credit(rule, group, log_probs=of_confidence, width=width)
    assert torch.equal(scored.lengths, lengths[order])
    ends = torch.zeros(len(rows), scored.segment_ends.shape[1], dtype=torch.int64)
    advantages = torch.zeros(len(rows), width)
    advantages[order], ends[order] = credited.token_advantages, scored.segment_ends
    return advantages, ends
