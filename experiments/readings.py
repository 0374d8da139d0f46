"""Readings of a confidence: the greedy and the expected number of each question.

The numbers form a trie of tokens, which is run once for each question, over all its paths together; this is about as
much work as one more response.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Decoder
from experiments.answers import Answer, Reading, with_reading

_DEFAULT_ROWS = 512  # of the cache at once, if rollout.batch_responses is null


def with_readings(
    policy: Policy, records: Sequence[Record], predictions: Sequence[Prediction], config: RunConfig
) -> list[Answer]:
    """Add the readings to the policy's answers to ``records``, several in a row to each.

    There are none if no answer states a confidence.  The method must state it before the answer.
    """
    numbers = Numbers.of(policy, (p.response for p in predictions), config.method.confidence_decimals)
    if numbers is None:
        return [with_reading(p, None) for p in predictions]
    prompts = policy.encode_prompts(records, config.method.system_prompt)
    readings = read_confidences(policy, prompts, numbers, config.rollout.batch_responses or _DEFAULT_ROWS)
    samples = len(predictions) // len(records)
    return [with_reading(p, readings[row // samples]) for row, p in enumerate(predictions)]


_STATED = re.compile(rf"(\s*{re.escape(OPEN_TAG)}\s*)\d*\.?\d+(\s*{re.escape(CLOSE_TAG)})")
_DECIMALS = 2  # of the numbers where any are allowed


@dataclass(frozen=True)
class Numbers:
    """Beginnings of responses that state a confidence."""

    values: Sequence[float]  # `[N]` stated confidences; a value may have several spellings
    token_ids: Sequence[tuple[int, ...]]  # of each beginning

    @classmethod
    def of(cls, policy: Policy, responses: Iterable[str], decimals: int | None) -> "Numbers | None":
        """Numbers in the most frequent form of confidence-first ``responses``; None if none states a confidence.

        With ``decimals``, all numbers with that many decimals.  Otherwise all numbers with at most two decimals, each
        with the token behind it, which marks its end.
        """
        found = Counter(match.groups() for response in responses if (match := _STATED.match(response)))
        if not found:
            return None
        (before, behind), _ = found.most_common(1)[0]
        steps = 10 ** (decimals or _DECIMALS)
        spellings = [(f"{i / steps:.{decimals or _DECIMALS}f}", i / steps) for i in range(steps + 1)]
        if decimals is None:
            spellings += [(f"{i / 10:.1f}", i / 10) for i in range(11)] + [("0", 0.0), ("1", 1.0)]
        rows = []
        for number, _ in spellings:
            text = f"{before}{number}"
            ids = policy.tokenizer.encode(text if decimals else text + behind, add_special_tokens=False)
            ends = accumulate(len(policy.text.bytes_of(token)) for token in ids)
            last = next((at for at, end in enumerate(ends) if end > len(text.encode())), len(ids) - 1)
            rows.append(tuple(ids[: last + 1]))
        return cls([value for _, value in spellings], rows)

    def log_probs(self, policy: Policy, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Log-prob of each number at each prompt, float64 ``[P, N]``, and the greedy number, int64 ``[P]``."""
        result = torch.zeros(len(prompts), len(self.values), dtype=torch.float64)
        nodes: dict[tuple[int, ...], int] = {(): 0}  # by their tokens
        total = torch.zeros(len(prompts), 1, dtype=torch.float64)
        greedy = torch.zeros(len(prompts), dtype=torch.int64)  # the greedy node at this depth; -1: it has ended
        chosen = torch.zeros(len(prompts), dtype=torch.int64)
        depth = 0
        with torch.inference_mode(), policy.autocast():
            decoder = Decoder(policy, prompts, max(map(len, self.token_ids)))
            while nodes:
                paths = list(dict.fromkeys(row[: depth + 1] for row in self.token_ids if len(row) > depth))
                children = {path: at for at, path in enumerate(paths)}
                parents = torch.tensor([nodes[path[:-1]] for path in paths])
                logits = policy.sampling_logits(decoder.logits, 1.0).log_softmax(-1).unflatten(0, (len(prompts), -1))
                tokens = torch.tensor([path[-1] for path in paths])
                edges = logits[:, parents.to(policy.device), tokens.to(policy.device)].double().cpu()
                total = total[:, parents] + edges
                best = edges.masked_fill(parents != greedy[:, None], -torch.inf).argmax(dim=1)
                going = greedy >= 0
                for number, row in enumerate(self.token_ids):
                    if len(row) == depth + 1:
                        at = children[row]
                        result[:, number] = total[:, at]
                        chosen[going & (best == at)] = number
                inner = sorted({children[row[: depth + 1]] for row in self.token_ids if len(row) > depth + 1})
                if not inner:
                    break
                place = torch.full((len(paths),), -1)
                place[inner] = torch.arange(len(inner))
                greedy = torch.where(going, place[best], -1)
                rows = torch.arange(len(prompts))[:, None] * len(nodes) + parents[inner]
                decoder.keep(rows.flatten().to(policy.device))
                decoder.step(tokens[inner].repeat(len(prompts))[:, None].to(policy.device))
                nodes, total = {paths[at]: i for i, at in enumerate(inner)}, total[:, inner]
                depth += 1
        return result, chosen


def read_confidences(policy: Policy, prompts: Sequence[Sequence[int]], numbers: Numbers, rows: int) -> list[Reading]:
    """Greedy and expected confidence at each prompt; at most about ``rows`` rows of the cache at once."""
    widest = max(len({row[:depth] for row in numbers.token_ids}) for depth in range(max(map(len, numbers.token_ids))))
    at_once = max(1, rows // widest)
    values = torch.tensor(numbers.values, dtype=torch.float64)
    found: list[Reading] = []
    for start in range(0, len(prompts), at_once):
        log_probs, greedy = numbers.log_probs(policy, prompts[start : start + at_once])
        mass = log_probs.logsumexp(dim=1).exp().clamp(max=1)
        expectation = log_probs.softmax(dim=1) @ values
        columns = (values[greedy].tolist(), expectation.tolist(), mass.tolist())
        found += [Reading(*row) for row in zip(*columns, strict=True)]
    return found
