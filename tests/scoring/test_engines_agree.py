"""Every engine's way from tokens, log-probs and verdicts to token advantages, on the same responses."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from coca_mindspeed import coca_advantages
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.mindspeed.stages.advantage_task import compute_advantages
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, score_columns
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.scoring.rollout import Sampled, Scored, confidence_log_probs
from coca_mindspeed.utils.tokenization import token_text
from coca_mindspeed.verl.batch import score_rows, score_step
from coca_mindspeed.verl.settings import VerlSettings
from tests.mindspeed.builders import FakeDock, without_ray
from tests.tokenizers_for_tests import qwen_like

P, G = 4, 4
TEXTS = [f"<confidence>{s}</confidence>\n{n * 11}" for n, s in enumerate(("0.25", "0.50", "1.00", "0.05") * P)]
TEXTS[6], TEXTS[9] = "no confidence here: 7 7 7 7 7 7 7 7 7 7 7 7", TEXTS[8]
CORRECT = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0]
OUTCOME = {1.0: Outcome.RIGHT, 0.0: Outcome.WRONG}


class Responses(NamedTuple):
    token_ids: torch.Tensor
    log_probs: torch.Tensor
    scored: Scored


def scored(method):
    table = token_text(qwen_like(), len(qwen_like()))
    texts = [f"<think>\n{text} so\n</think>\n\n{text[-2:]}" for text in TEXTS] if method.thinking else TEXTS
    rows = [torch.tensor([*qwen_like()(text)["input_ids"], qwen_like().eos_token_id]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sampled = Sampled(token_ids=ids, lengths=torch.tensor(list(map(len, rows))))
    parsed = sampled.read(table, method)
    log_probs = -torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) * 4
    return Responses(ids, log_probs, parsed.scored(torch.tensor(CORRECT, dtype=torch.float64)))


def by_local_engine(responses, method):
    rule, scored = CreditRule(method, 0), responses.scored
    log_probs = confidence_log_probs(rule, responses.log_probs, scored.segment_ends)
    return scored.give_credit(rule, G, log_probs=log_probs).token_advantages


def by_library(responses, method):
    scored = responses.scored
    return coca_advantages(
        *(responses.token_ids, scored.lengths, scored.correct, qwen_like(), G),
        method=method,
        log_probs=responses.log_probs,
    ).advantages


def by_verl(responses, method):
    shuffled = torch.randperm(P * G, generator=torch.Generator().manual_seed(0)).tolist()
    reports = [
        {"verdict": OUTCOME.get(correct, Outcome.UNGRADABLE).value, "reason": "", "prediction": {"response": ""}, **row}
        for correct, row in zip(CORRECT, score_rows(responses.scored), strict=True)
    ]
    found = score_step(
        keys=[f"u{row // G}_{row % G}_0" for row in shuffled],
        tags=[{}] * (P * G),
        rows=[reports[row] for row in shuffled],
        response_lengths=responses.scored.lengths[shuffled],
        old_log_probs=responses.log_probs[shuffled],
        prompts=P,
        group=G,
        settings=VerlSettings(method=method),
        stage=0,
    )
    return torch.empty(responses.token_ids.shape).index_copy_(0, torch.tensor(shuffled), found.columns()["advantages"])


def by_mindspeed_rl(responses, method):
    dock = FakeDock(rows=P * G, group=G, shuffle=True)
    lengths, rows = responses.scored.lengths.tolist(), list(range(P * G))
    for name, column in {**score_columns(responses.scored), ROLLOUT_LOG_PROBS: responses.log_probs}.items():
        dock.put_experience.remote(
            {name: [row[: lengths[i]] if name == ROLLOUT_LOG_PROBS else row for i, row in enumerate(column)]}, rows
        )
    options = {"count": G, "group_size": G, "rows": P * G, "guarantee_order": False, "sample_prompts": 0}
    compute_advantages(dock, CocaSettings(method=method), **options)
    return torch.nn.utils.rnn.pad_sequence([dock.data["advantages"][row] for row in rows], batch_first=True)


@pytest.mark.parametrize("bonus", [0.0, 0.05])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_same_responses_have_the_same_advantages(monkeypatch, bonus, scale, separate, thinking):
    without_ray(monkeypatch)
    method = method_settings(
        entropy_bonus=bonus,
        advantage_scale=scale,
        separate_format=separate,
        advantage_eps=0.05,
        confidence_decimals=2,
        thinking=thinking,
    )
    assert int(scored(method).scored.stated.isnan().sum()) == 1
    expected = by_local_engine(scored(method), method)
    plain = by_local_engine(scored(method), replace(method, entropy_bonus=0.0))
    assert torch.equal(expected, plain) == (bonus == 0)
    for engine in (by_library, by_verl, by_mindspeed_rl):
        found = engine(scored(method), method)
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if engine is by_library else 1e-6)
