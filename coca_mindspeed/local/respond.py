"""Responses of a policy: one step's rollout, the predictions of an evaluation, and readings of a confidence.

Readings are the greedy and the expected number of each question.  The numbers form a trie of tokens, which is run once
for each question, over all its paths together; this is about as much work as one more response.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG
from coca_mindspeed.config.schema import MethodConfig, RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Decoder, Rollout, sample_responses
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.responses import predictions, response_scorer
from coca_mindspeed.scoring.rollout import Credited


def respond(
    policy: Policy,
    records: Sequence[Record],
    method: MethodConfig,
    sampling: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Rollout:
    """Sample ``group_size`` responses to each record; NoDistributionError if probabilities are not finite.

    ``progress`` as of :func:`.sample_responses`.
    """
    return sample_responses(
        policy,
        policy.encode_prompts(records, method.training_method.system_prompt),
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        generator=generator,
        batch_responses=sampling.batch_responses,
        progress=progress,
    )


def step_metrics(rollout: Rollout, credited: Credited) -> dict[str, float]:
    """Metrics of a step's responses, by the names of metrics.jsonl; NaN where undefined."""
    return {
        **values(rollout_metrics(credited)),
        "rollout/entropy": float(rollout.entropy.mean()),
        "response/cut_off_share": float((~rollout.finished).float().mean()),
    }


def predict(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    sampling: RolloutConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda done: None,
    *,
    samples: int = 1,
    readings: bool = False,
) -> list[Prediction]:
    """Answer every record ``samples`` times at temperature 1 and grade the answers (paper, evaluation protocol).

    The temperature of ``sampling`` is not used.  ``progress`` is called with the number of records done.  ``readings``
    adds the greedy and the expected confidence of each question, if the method states one before the answer.
    """
    sampling = sampling.model_copy(update={"temperature": 1.0})
    rows = sampling.batch_responses or _DEFAULT_BATCH_RESPONSES
    at_once = max(1, rows // samples)
    score = response_scorer(method, policy.text, grader)
    answers: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        graded = score(respond(policy, chunk, method, sampling, generator, samples), chunk)
        answers += [replace(p, sample=row % samples) for row, p in enumerate(predictions(graded))]
        progress(start + len(chunk))
    if not readings or method.training_method.confidence_position == "last":
        return answers
    numbers = Numbers.of(policy, (p.response for p in answers), method.confidence_decimals)
    if numbers is None:
        return answers
    prompts = policy.encode_prompts(records, method.training_method.system_prompt)
    read = read_confidences(policy, prompts, numbers, rows)
    return [
        replace(p, greedy_confidence=greedy, expected_confidence=expectation, confidence_mass=min(1.0, mass))
        for p, (greedy, expectation, mass) in zip(answers, (r for r in read for _ in range(samples)), strict=True)
    ]


_DEFAULT_BATCH_RESPONSES = 512  # responses per batch of an evaluation if rollout.batch_responses is null


def largest_evaluation_batch(config: RunConfig) -> int:
    """Responses in the largest batch of a run's evaluations; 0: it has none."""
    evaluation, data = config.evaluation, config.data
    questions = [evaluation.questions] if evaluation.interval else []
    if evaluation.final_questions != 0 and (data.name == "arithmetic" or data.evaluate is not None):
        questions.append(evaluation.final_questions)
    most, samples = config.rollout.batch_responses or _DEFAULT_BATCH_RESPONSES, evaluation.samples
    sizes = [most if count is None else min(most, count * samples) for count in questions]
    return max((max(samples, size) for size in sizes), default=0)


_STATED = re.compile(rf"(\s*{re.escape(OPEN_TAG)}\s*)\d*\.?\d+(\s*{re.escape(CLOSE_TAG)})")
_DECIMALS = 2  # of the numbers where any are allowed


class Reading(NamedTuple):
    """Readings of one question's confidence."""

    greedy: float  # the number of greedy decoding
    expectation: float  # under the policy's probabilities of the numbers, normalised
    mass: float  # sum of these probabilities; the rest of the probability is on other text


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
        nodes: list[tuple[int, ...]] = [()]
        total = torch.zeros(len(prompts), 1, dtype=torch.float64)
        greedy = torch.zeros(len(prompts), dtype=torch.int64)  # the greedy node at this depth; -1: it has ended
        chosen = torch.zeros(len(prompts), dtype=torch.int64)
        depth = 0
        with torch.inference_mode(), policy.autocast():
            decoder = Decoder(policy, prompts, max(map(len, self.token_ids)))
            while nodes:
                children = list(dict.fromkeys(row[: depth + 1] for row in self.token_ids if len(row) > depth))
                parents = torch.tensor([nodes.index(child[:-1]) for child in children])
                logits = policy.sampling_logits(decoder.logits, 1.0).log_softmax(-1).unflatten(0, (len(prompts), -1))
                tokens = torch.tensor([child[-1] for child in children])
                edges = logits[:, parents.to(policy.device), tokens.to(policy.device)].double().cpu()
                total = total[:, parents] + edges
                best = edges.masked_fill(parents != greedy[:, None], -torch.inf).argmax(dim=1)
                going = greedy >= 0
                for number, row in enumerate(self.token_ids):
                    if len(row) == depth + 1:
                        at = children.index(row)
                        result[:, number] = total[:, at]
                        chosen[going & (best == at)] = number
                inner = sorted({children.index(row[: depth + 1]) for row in self.token_ids if len(row) > depth + 1})
                if not inner:
                    break
                place = torch.full((len(children),), -1)
                place[inner] = torch.arange(len(inner))
                greedy = torch.where(going, place[best], -1)
                rows = torch.arange(len(prompts))[:, None] * len(nodes) + parents[inner]
                decoder.keep(rows.flatten().to(policy.device))
                decoder.step(tokens[inner].repeat(len(prompts))[:, None].to(policy.device))
                nodes, total = [children[i] for i in inner], total[:, inner]
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
        mass = log_probs.logsumexp(dim=1).exp()
        expectation = log_probs.softmax(dim=1) @ values
        columns = (values[greedy].tolist(), expectation.tolist(), mass.tolist())
        found += [Reading(*row) for row in zip(*columns, strict=True)]
    return found
