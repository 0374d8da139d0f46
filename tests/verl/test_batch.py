"""verl's batches: groups in any order, with padding and missing responses; advantages on the right rows; validation."""

import itertools
import math
import random
from typing import Any

import pytest
import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.scoring.rollout import Scored, confidences
from coca_mindspeed.verl.batch import (
    find_groups,
    score_step,
    step_metrics,
    validation_metrics,
    validation_predictions,
)
from coca_mindspeed.verl.settings import VerlSettings
from tests.verl.configurations import columns

P, G = 3, 4
RIGHT, WRONG, UNGRADABLE = Outcome.RIGHT, Outcome.WRONG, Outcome.UNGRADABLE
KEYS = [f"u{group}_{session}_0" for group in range(P) for session in range(G)]


def test_groups_are_found_in_any_order():
    keys = random.Random(0).sample(KEYS, len(KEYS))
    found = find_groups(keys, [{}] * len(keys), G, P)
    named = [keys[row] for row in found.rows]
    assert (sorted(named), found.broken) == (KEYS, 0)
    for start in range(0, P * G, G):
        uid = named[start].split("_")[0]
        assert named[start : start + G] == [f"{uid}_{session}_0" for session in range(G)]


@pytest.mark.parametrize(
    ("keys", "padding", "prompts", "rows", "broken"),
    [
        (KEYS[:8], ["padabc_0_0", "padabc_1_0"], 2, range(8), 0),
        (KEYS[:6] + KEYS[7:], [], 3, [0, 1, 2, 3, 7, 8, 9, 10], 1),  # u1_2_0 is missing
        (KEYS[:8], [], 3, range(8), 1),  # u2 is missing
        (["a_b_0_0", "a_b_1_0", "a_b_2_0", "a_b_3_0"], [], 1, range(4), 0),  # a uid with underscores
    ],
)
def test_only_complete_groups_are_used(keys, padding, prompts, rows, broken):
    tags = [{}] * len(keys) + [{"is_padding": True}] * len(padding)
    assert find_groups([*keys, *padding], tags, G, prompts) == (tuple(rows), broken)


@pytest.mark.parametrize(
    "keys",
    [
        ["u0_0_0", "u0_0_1"],  # a second turn
        ["u0_0_0", "u0_0_0"],  # one sample twice
        ["u0_0_0", "u0_1_0", "u0_2_0"],  # three responses of two
        ["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"],  # two prompts of one
        ["u0"],
        ["u0_a_0"],
    ],
)
def test_impossible_batches_are_refused(keys):
    with pytest.raises(TrainingError):
        find_groups(keys, [{}] * len(keys), 2, 1)


def shuffled(seed=0):
    """Keys, reports of the reward manager and lengths of P * G responses, shuffled."""
    draw = random.Random(seed)
    rows = []
    for key in KEYS:
        tokens = draw.randint(4, 9)
        stated = None if draw.random() < 0.2 else draw.randint(0, 10) / 10
        said = columns(
            stated, draw.choice([RIGHT, WRONG]), confidence_tokens=draw.randint(1, tokens - 1), tokens=tokens
        )
        rows.append((key, said, tokens))
    draw.shuffle(rows)
    return [key for key, _, _ in rows], [said for _, said, _ in rows], torch.tensor([n for _, _, n in rows])


def step(settings=None, stage=0, **changes):
    keys, rows, lengths = shuffled()
    arguments = {"keys": keys, "tags": [{}] * len(keys), "rows": rows, "response_lengths": lengths, **changes}
    arguments = {"prompts": P, "group": G, **arguments}
    return score_step(settings=VerlSettings.model_validate(settings or {}), stage=stage, **arguments)


def one_group(*rows, **settings):
    """One group of responses of five tokens."""
    n = len(rows)
    return step(
        settings, keys=KEYS[:n], tags=[{}] * n, rows=rows, response_lengths=torch.tensor([5] * n), prompts=1, group=n
    )


def metrics(*scored):
    return step_metrics(scored)


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("method", METHODS)
def test_each_row_has_the_advantages_of_the_credit_rule(method, scale):
    settings = VerlSettings.model_validate({"method": {"name": method, "advantage_scale": scale}})
    keys, rows, lengths = shuffled()
    twice = METHODS[method].confidence_position == "both"
    if twice:
        for said in rows:
            first, whole = said["segment_ends"]
            said |= {"segment_ends": [first, first, whole], "stated_confidence": said["stated_confidence"] * 2}
    by_key = dict(zip(keys, rows, strict=True))
    reports = [by_key[key] for key in KEYS]
    stated = confidences(report["prediction"]["confidence"] for report in reports)
    score_columns = {
        "stated_confidence": stated[:, None].expand(-1, 1 + twice),
        "correct": torch.tensor([[report["verdict"] == "right"] for report in reports]),
        "confidence_length": torch.tensor([report["confidence_length"] for report in reports]),
        "segment_ends": torch.tensor([report["segment_ends"] for report in reports]),
    }
    expected = Scored.from_columns(score_columns).give_credit(CreditRule(settings.method, 0), G)
    found = step(settings.model_dump(), keys=keys, rows=rows, response_lengths=lengths).columns()
    for place, key in enumerate(KEYS):
        row = keys.index(key)
        torch.testing.assert_close(found["advantages"][row], expected.token_advantages[place], rtol=0, atol=0)
        assert found["segment_ends"][row].tolist() == by_key[key]["segment_ends"]
    assert found["advantages"].any()


def sampled_twice(shown, weights, others):
    """All 16 groups of two responses by a policy of four texts for one confidence, and their probabilities.

    The policy that samples has the probabilities ``weights``; ``shown`` are the log-probs that the trainer knows.
    """
    pairs = list(itertools.product(range(4), repeat=2))
    found = step(
        {"method": {"advantage_scale": "none", "entropy_bonus": 1.0}},
        keys=[f"u{pair}_{session}_0" for pair in range(16) for session in (0, 1)],
        tags=[{}] * 32,
        rows=[columns(0.5, RIGHT)] * 32,
        response_lengths=torch.tensor([5] * 32),
        old_log_probs=torch.tensor([[shown[text], -0.25, -0.25, *others] for pair in pairs for text in pair]),
        prompts=16,
        group=2,
    )
    chance = torch.tensor([weights[first] * weights[second] for first, second in pairs])
    return torch.tensor(pairs), chance, found.columns()["advantages"].view(16, 2, 5)


def test_the_bonus_of_old_log_probs_raises_the_entropy_whatever_weights_sampled():
    """The gradient that the loss has in expectation, by enumeration, with token weights pi / mu.

    It is half of the entropy's (the mean of a group of two holds the response itself).  The log-probs of earlier
    weights mu would add the gradient of KL(pi || mu): they would drive the policy away from what it was.
    """
    logits = torch.tensor([0.5, -0.3, 1.2, 0.1], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    pi = logits.softmax(0)
    (entropy,) = torch.autograd.grad(torch.special.entr(pi).sum(), logits, retain_graph=True)
    (divergence,) = torch.autograd.grad((pi * (pi.log() - mu.log())).sum(), logits, retain_graph=True)
    for shown, expected in ((pi, entropy), (mu, entropy + divergence)):
        pairs, chance, advantages = sampled_twice(shown.detach().log().tolist(), mu.tolist(), (-7.0, -3.0))
        weighted = (pi / mu).detach()[pairs] * advantages[:, :, 0]
        (gradient,) = torch.autograd.grad(
            (chance[:, None] * weighted * pi.log()[pairs]).sum() / 2, logits, retain_graph=True
        )
        torch.testing.assert_close(gradient, expected / 2, rtol=1e-5, atol=1e-7)
        assert not advantages[:, :, 3:].any(), "answers earn no bonus"


def test_metrics_of_mini_batches_have_their_bonus():
    """Both mini-batches state one confidence everywhere, so that only the bonus differs within a group."""

    def part(bonus, scale):
        return step(
            {"method": {"entropy_bonus": bonus}},
            keys=KEYS[:G],
            tags=[{}] * G,
            rows=[columns(0.5, RIGHT)] * G,
            response_lengths=torch.tensor([5] * G),
            old_log_probs=-torch.arange(float(G))[:, None].expand(G, 5) * scale,
            prompts=1,
        )

    for bonus, expected in ((0.1, 0.5), (0.0, 1.0)):
        assert metrics(part(bonus, 1.0), part(bonus, 0.0))["group/no_confidence_variance_share"] == expected
    with pytest.raises(ValueError, match="log_probs"):
        step({"method": {"entropy_bonus": 0.1}})


def test_the_stage_decides_what_sequential_rewards():
    """And metrics have the names of every engine, without undefined ones."""
    invalid = metrics(one_group(*[columns(None, RIGHT)] * G))
    assert {"rollout/auroc", "rollout/ece", "rollout/confidence"}.isdisjoint(invalid)
    assert invalid["rollout/invalid_share"] == 1.0
    assert {"reward/answer", "rollout/gesr", "response/confidence_length"} <= invalid.keys()
    assert all(map(math.isfinite, invalid.values()))
    first, second = (step({"method": {"name": "sequential"}}, stage) for stage in (0, 1))
    assert not torch.equal(first.credited.token_advantages, second.credited.token_advantages)
    assert [metrics(each)["stage"] for each in (first, second)] == [0.0, 1.0]
    assert "stage" not in metrics(step())


def test_padding_and_broken_groups_have_no_advantages():
    """Nor do they make the batch narrower: its columns have the width of its longest response."""
    keys, rows, lengths = shuffled()
    lost, longest = keys.index("u1_2_0"), int(lengths.max()) + 3
    lengths[keys.index("u1_0_0")] = longest
    changes: dict[str, Any] = {
        "keys": [*keys[:lost], *keys[lost + 1 :], "pad_0_0"],
        "tags": [{}] * 11 + [{"is_padding": True}],
        "rows": [*rows[:lost], *rows[lost + 1 :], {}],
        "response_lengths": torch.cat([lengths[:lost], lengths[lost + 1 :], torch.tensor([1])]),
    }
    with pytest.raises(TrainingError, match=r"1 of 3 groups .*coca\.broken_groups"):
        step(**changes)
    found = step({"broken_groups": 1}, **changes)
    written = found.columns()
    assert written["advantages"].shape == (len(changes["keys"]), longest)
    for row, key in enumerate(changes["keys"]):
        if key.startswith(("u1", "pad")):
            assert not written["advantages"][row].any()
            assert not written["segment_ends"][row].any()
    assert written["advantages"].any()
    assert metrics(found)["group/broken"] == 1.0
    assert len(found.dump(7, 99)) == 2 * G


def test_an_ungradable_answer_is_left_out_of_its_group():
    """By hand: verdicts (right, wrong, ungradable, wrong), so GESR is 1/3, and the third row learns nothing."""
    failed = columns(0.5, UNGRADABLE, reason="no sandbox")
    found = one_group(
        columns(0.5, RIGHT), columns(0.5, WRONG), failed, columns(0.5, WRONG), method={"advantage_eps": 0.0}
    )
    assert found.credited.credit.gesr.tolist() == [[pytest.approx(1 / 3)]]
    # r_a = (1, 0, 0): mean 1/3, sample deviation 1/sqrt(3)
    expected = [2 / math.sqrt(3), -1 / math.sqrt(3), 0.0, -1 / math.sqrt(3)]
    advantages = found.columns()["advantages"]
    assert advantages[:, -1].tolist() == pytest.approx(expected)
    assert not advantages[2].any()
    assert metrics(found)["rollout/accuracy"] == pytest.approx(1 / 3)
    assert metrics(found)["grading/ungradable_share"] == 1 / G
    assert [row["correct"] for row in found.dump(1, 1)] == [True, False, None, False]
    with pytest.raises(TrainingError, match="no sandbox"):
        one_group(*[failed] * G)


def test_reports_of_another_reward_manager_are_refused():
    with pytest.raises(TrainingError, match=r"row u0_0_0: .*reward\.reward_manager\.name=coca"):
        one_group({"acc": 1.0}, {"acc": 1.0})
    with pytest.raises(TrainingError, match=r"reward\.reward_manager\.name=coca"):
        validation_predictions({"reward": [1.0], "acc": [1.0]})


def test_the_dump():
    found = step()
    dump = found.dump(3, P)
    assert found.dump(3, 2) == dump[: 2 * G]
    assert len(dump) == P * G
    reports = dict(zip(*shuffled()[:2], strict=True))
    for key, row in zip(KEYS, dump, strict=True):
        assert (row["step"], row["question"], row["gold"]) == (3, "1+1=", "2")
        assert (row["verdict"], row["confidence"]) == (
            reports[key]["verdict"],
            reports[key]["prediction"]["confidence"],
        )
    assert [row["gesr"] for row in dump[::G]] == pytest.approx(found.credited.credit.gesr.flatten().tolist())


@pytest.mark.parametrize(("method", "stage"), [({}, 0), ({"advantage_scale": "batch"}, 0), ({"name": "sequential"}, 1)])
def test_the_metrics_of_mini_batches_are_those_of_one_batch(method, stage):
    """Calibration and the error of the gap are no means of the mini-batches' own."""
    keys, rows, lengths = shuffled()
    settings = {"method": method, "broken_groups": 1}
    lost = [at for at, key in enumerate(keys) if not key.startswith("u2_3")]

    def part(uids, prompts):
        at = [i for i in lost if keys[i][1] in uids]
        given = {"keys": [keys[i] for i in at], "tags": [{}] * len(at), "rows": [rows[i] for i in at]}
        return step(settings, stage, **given, response_lengths=lengths[at], prompts=prompts)

    whole, parts = part("012", 3), [part("0", 1), part("12", 2)]
    expected, found = metrics(whole), metrics(*parts)
    if "advantage_scale" in method:
        deviations = [metrics(each).pop("advantage/deviation") for each in parts]
        assert found.pop("advantage/deviation") == pytest.approx(sum(deviations) / 2)
        assert expected.pop("advantage/deviation") > 0
    assert found == pytest.approx(expected)
    assert found["group/broken"] == 1
    assert {"rollout/ece", "first_sight/gap_error"} <= found.keys()


def test_the_metrics_of_a_validation():
    said = [columns(0.5, RIGHT), columns(0.5, WRONG), columns(None, WRONG)]

    def found():
        lists = {name: [each[name] for each in said] for name in said[0]}
        return validation_predictions(lists | {"reward": [each["acc"] for each in said]})

    known = validation_metrics(found())
    assert known["eval/ece"] == 0.0
    assert known["eval/accuracy"] == pytest.approx(1 / 3)
    assert known["eval/tokens_to_confidence"] == 3.0
    assert known["eval/ungradable_share"] == 0.0
    said.append(columns(0.9, UNGRADABLE, reason="no sandbox"))
    assert validation_metrics(found()) == {**known, "eval/ungradable_share": 0.25}
    assert validation_metrics([]) == {}


def test_the_first_epoch_and_later_ones_are_measured_apart():
    found = step()
    first, later = metrics(found), step_metrics([found], repeated=True)
    assert first["first_sight/accuracy"] == later["repeated/accuracy"]
    assert first["first_sight/confidence"] == later["repeated/confidence"]
    assert not any(name.startswith("repeated/") for name in first)
