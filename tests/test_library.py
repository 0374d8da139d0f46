"""The names that ``coca_mindspeed`` exports, used as docs/library.md does: no other module of ours is imported here."""

import math
import re
from pathlib import Path

import pytest
import torch

import coca_mindspeed
from coca_mindspeed import (
    CreditRule,
    coca_advantages,
    confidence_segment_lengths,
    method_settings,
    parse_response,
    segment_objective,
    token_text,
    training_method,
)
from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import SEGMENTS
from tests.tokenizers_for_tests import qwen_like

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
TEXTS = [
    "<confidence>0.5</confidence>\n42",
    "<confidence>1</confidence> 41",
    "<confidence> 0.9 </confidence>42",
    "no confidence, and a long answer that stands in for it: 7 7 7 7 7 7 7 7 7 7",
]
CORRECT = [True, False, True, False]


def batch(texts=TEXTS, padding=-100):
    rows = [[*qwen_like()(text)["input_ids"], qwen_like().eos_token_id] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows))), padding)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return ids, torch.tensor([len(row) for row in rows])


def test_every_exported_name_exists_and_unknown_names_do_not():
    assert {name for name in coca_mindspeed.__all__ if not hasattr(coca_mindspeed, name)} == set()
    assert set(coca_mindspeed.__all__) <= set(dir(coca_mindspeed))
    with pytest.raises(AttributeError):
        coca_mindspeed.coca_advantage  # noqa: B018


def test_advantages_of_a_group_by_hand():
    ids, lengths = batch()
    found = coca_advantages(ids, lengths, CORRECT, qwen_like(), 4, method=method_settings(max_confidence_tokens=5))
    assert found.confidences.tolist()[:3] == [0.5, 1.0, 0.9]
    assert math.isnan(found.confidences[3])
    assert found.answers == ["\n42", " 41", "42", TEXTS[3]]
    segment = found.masks["confidence"].sum(dim=1)
    closed = [qwen_like().decode(row[:n]) for row, n in zip(ids.tolist(), segment.tolist(), strict=True)]
    assert [text.count("</confidence>") for text in closed[:3]] == [1, 1, 1]
    assert segment[3] == 5
    # Two of four are right, so the answer rewards 1, 0, 1, 0 have the sample deviation sqrt(1/3).
    answers = torch.tensor([0.5, -0.5, 0.5, -0.5]) / (math.sqrt(1 / 3) + 1e-6)
    last = found.advantages[torch.arange(4), lengths - 1]
    torch.testing.assert_close(last, answers)
    assert found.metrics["rollout/gesr"] == 0.5
    assert found.metrics["reward/confidence"] == pytest.approx((0 - 0.25 - 0.16 - 1) / 4)
    assert found.metrics["rollout/invalid_share"] == 0.25
    assert not found.advantages[~(found.masks["confidence"] | found.masks["answer"])].any()


def test_it_equals_its_parts():
    ids, lengths = batch(padding=0)
    correct = torch.tensor(CORRECT)
    table = token_text(qwen_like(), len(qwen_like()))
    stated = [parse_response(text).confidence for text in table.decode(ids, lengths)]
    confidence = torch.tensor([math.nan if s is None else s for s in stated], dtype=torch.float64)
    segment = confidence_segment_lengths(ids, lengths, table, ~confidence.isnan())
    rule = CreditRule(method_settings())
    credit = rule(correct[None].double(), confidence[None])
    expected = torch.zeros(ids.shape)
    for row, (inside, length) in enumerate(zip(segment.tolist(), lengths.tolist(), strict=True)):
        expected[row, :length] = credit.segments["answer"].values[0, row]
        expected[row, :inside] = credit.segments["confidence"].values[0, row]
    for tokenizer in (table, qwen_like()):
        found = coca_advantages(ids, lengths, correct, tokenizer, 4)
        assert torch.equal(found.advantages, expected)
        assert torch.equal(found.masks["confidence"].sum(dim=1), segment)


def test_processes_share_one_scale_through_reduce():
    ids, lengths = batch()
    sums = []
    halves = [slice(0, 2), slice(2, 4)]

    def advantages(rows, **options):
        own = ids[rows], lengths[rows], CORRECT[rows]
        return coca_advantages(
            *own, qwen_like(), 2, method=method_settings(advantage_scale="batch"), **options
        ).advantages

    for half in halves:
        advantages(half, reduce=lambda *own: sums.append(own) or own)
    total = sum(squares for squares, _ in sums), sum(count for _, count in sums)
    found = torch.cat([advantages(half, reduce=lambda *_: total) for half in halves])
    torch.testing.assert_close(found, advantages(slice(0, 4)))
    assert not torch.equal(found, coca_advantages(ids, lengths, CORRECT, qwen_like(), 2).advantages)


def test_the_entropy_bonus_reads_the_confidences_log_probs():
    """Brier 0, -.25, -.16 among the valid; improbable answers earn nothing."""
    ids, lengths = batch()
    plain = coca_advantages(ids, lengths, CORRECT, qwen_like(), 4)
    inside = plain.masks["confidence"]
    log_probs = torch.full(ids.shape, -100.0)
    log_probs[inside] = 0.0
    log_probs[1, 0] = -3.0
    method = method_settings(entropy_bonus=0.1)
    found = coca_advantages(ids, lengths, CORRECT, qwen_like(), 4, method=method, log_probs=log_probs)
    among = torch.tensor([0.0, -0.25 + 0.3, -0.16])
    expected = (among - among.mean()) / (among.std() + 1e-6)
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0])
    form = (valid - valid.mean()) / (valid.std() + 1e-6)
    torch.testing.assert_close(found.advantages[:, 0], form + torch.cat([expected, torch.zeros(1)]))
    assert torch.equal(found.advantages[~inside], plain.advantages[~inside])
    for more in ({"log_probs": log_probs[:, 1:]}, {}):
        with pytest.raises(ValueError, match="log_probs"):
            coca_advantages(ids, lengths, CORRECT, qwen_like(), 4, method=method, **more)


def test_an_ungradable_answer_is_left_out_of_its_group():
    ids, lengths = batch()
    partly = torch.tensor(CORRECT).double()
    partly[3] = math.nan
    found = coca_advantages(ids, lengths, partly, qwen_like(), 4)
    alone = coca_advantages(ids[:3], lengths[:3], CORRECT[:3], qwen_like(), 3)
    assert torch.equal(found.advantages[:3, : ids.shape[1]], alone.advantages)
    assert not found.advantages[3].any()
    assert found.metrics["grading/ungradable_share"] == 0.25
    none = coca_advantages(ids, lengths, [True, None, None, None], qwen_like(), 4)
    assert not none.advantages.any()
    assert none.metrics["group/dropped_share"] == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_loss_with_a_gradient(method):
    segments = SEGMENTS[METHODS[method].confidence_position]
    texts = [
        "".join(str(i) if s == "answer" else f"<confidence>0.{i}</confidence>" for s in segments) for i in (1, 5, 9)
    ]
    ids, lengths = batch(texts)
    stage = len(training_method(method).stages) - 1
    found = coca_advantages(ids, lengths, CORRECT[:3], qwen_like(), 3, method=method, stage=stage or None)
    assert torch.equal(sum(found.masks.values()).sum(dim=1), lengths)
    log_probs = torch.zeros(ids.shape, requires_grad=True)
    segment_objective(log_probs, torch.zeros(ids.shape), found.advantages, found.masks).loss.backward()
    torch.testing.assert_close(log_probs.grad, -found.advantages / 3)


def test_lists_of_token_ids_are_refused():
    with pytest.raises(TypeError, match="token_ids"):
        coca_advantages([[1, 2]], [2], [True], qwen_like(), 2)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"group_size": 3}, "group_size"),
        ({"group_size": 1}, "group_size"),
        ({"correct": CORRECT[:3]}, "correct"),
        ({"correct": [1.0, 0.0, 1.0, 0.0]}, "reward == 1"),
        ({"correct": [1, 0, None, 0]}, "reward == 1"),
        ({"correct": torch.tensor([1.0, 0.5, 1.0, 0.0])}, "correct"),
        ({"method": "cocoa"}, "cocoa"),
        ({"stage": 1}, "stage"),
        ({"method": "sequential"}, "stage"),
        ({"method": "caliber"}, "stage"),
        ({"lengths": torch.tensor([3, 3])}, "lengths"),
        ({"lengths": torch.tensor([3, 3, 3, 900])}, "lengths"),
        ({"token_ids": torch.tensor([3, 3, 3, 9])}, "token_ids"),
    ],
)
def test_wrong_arguments_are_named(changed, error):
    ids, lengths = batch()
    given = {"token_ids": ids, "lengths": lengths, "correct": CORRECT, "tokenizer": qwen_like(), "group_size": 4}
    with pytest.raises(ValueError, match=error):
        coca_advantages(**(given | changed))


def test_the_loop_of_the_page_learns():
    """A policy of one table of logits: its answers become right, and its confidence reward rises."""
    text = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(r"<!-- loop -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 13
    tokenizer, generator = qwen_like(), torch.Generator().manual_seed(0)
    ids, lengths = batch([f"<confidence>0.{s}</confidence>{a}" for s in "19" for a in "47"])
    logits = torch.zeros(4, requires_grad=True)  # a choice of four whole responses

    def sample(_, prompts, group):
        chosen.append(torch.multinomial(logits.softmax(0).detach(), len(prompts) * group, True, generator=generator))
        return ids[chosen[-1]], lengths[chosen[-1]], log_probs(None, prompts, None, group).detach()

    def log_probs(*_):
        """The first token has the log-probability of the confidence's half, the last one that of the answer's."""
        table = logits.log_softmax(0).view(2, 2)
        marginal = table.logsumexp(dim=1)
        rows = torch.zeros(len(chosen[-1]), ids.shape[1])
        rows[:, 0] = marginal[chosen[-1] // 2]
        last = lengths[chosen[-1]] - 1
        return rows.index_put((torch.arange(len(rows)), last), table.flatten()[chosen[-1]] - marginal[chosen[-1] // 2])

    chosen = []
    optimizer = torch.optim.Adam([logits], lr=0.2)
    model = type("Model", (), {"config": type("Config", (), {"vocab_size": len(tokenizer)})})
    shown = []
    names = {"tokenizer": tokenizer, "model": model, "optimizer": optimizer, "sample": sample, "log_probs": log_probs}
    names["batches"] = [(["4 or 7?"] * 8, ["4"] * 8)] * 40
    names["is_right"] = lambda answer, gold: answer.startswith(gold) and "7" not in answer
    names["print"] = lambda *values: shown.append(values)
    exec(code, names)  # noqa: S102 - the page's own code
    (first_accuracy, first_ece, _), (accuracy, ece, _) = shown[0], shown[-1]
    assert first_accuracy < 0.75 < 0.9 < accuracy
    assert ece < 0.15 < first_ece
