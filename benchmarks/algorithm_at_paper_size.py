"""The boundary search, and rewards with advantages, on 2,048 responses of up to 4,096 tokens in groups of 16.

Where verl is installed, its GRPO advantage runs in turn: one advantage where we make two.
"""

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import alternate
from coca_mindspeed.algorithm.advantages import token_advantages
from coca_mindspeed.algorithm.boundary import TokenText, segment_ends
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings

PROMPTS, GROUP, TOKENS = 128, 16, 4096


def run(rounds: int) -> dict[str, float]:
    """Median seconds of each stage."""
    generator = torch.Generator().manual_seed(0)
    responses = PROMPTS * GROUP
    # Two-byte tokens, as a byte-level vocabulary has on average three to four bytes a token.
    pieces = [b"<conf", b"iden", b"ce>", b" ", b"0.", b"83", b" </", b"conf", b"idence", b">\n"]
    vocabulary = pieces + [bytes([65 + i % 26, 97 + i // 26]) for i in range(500)]
    text = TokenText(vocabulary)
    token_ids = torch.randint(len(pieces), len(vocabulary), (responses, TOKENS), generator=generator)
    token_ids[:, : len(pieces)] = torch.arange(len(pieces))
    lengths = torch.randint(64, TOKENS + 1, (responses,), generator=generator)
    valid = torch.rand(responses, generator=generator) < 0.95
    correct = torch.rand(PROMPTS, GROUP, generator=generator) < 0.5
    confidence = torch.rand(PROMPTS, GROUP, generator=generator)
    ends = segment_ends(token_ids, lengths, text, [valid])
    rule, verdicts = CreditRule(method_settings()), correct.double()

    def advantages() -> Tensor:
        credit = rule(verdicts, confidence)
        return token_advantages([values.flatten() for values in credit.values_by_segment().values()], ends, TOKENS)

    candidates: dict[str, Callable[[], object]] = {
        "boundary search, s": lambda: segment_ends(token_ids, lengths, text, [valid]),
        "rewards and both advantages, s": advantages,
    }
    if importlib.util.find_spec("verl") is not None:
        candidates["verl compute_grpo_outcome_advantage, s"] = _verl(correct, lengths)
    return alternate(candidates, rounds)


def _verl(correct: Tensor, lengths: Tensor) -> Callable[[], object]:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    mask = (torch.arange(TOKENS) < lengths[:, None]).float()
    token_level_rewards = torch.zeros_like(mask)
    token_level_rewards[torch.arange(len(lengths)), lengths - 1] = correct.flatten().float()
    index = np.repeat(np.arange(PROMPTS), GROUP)
    return lambda: compute_grpo_outcome_advantage(token_level_rewards, mask, index)
