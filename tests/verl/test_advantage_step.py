"""Credit on the rows of verl's batch: the credit of every engine, on the right rows and nowhere else."""

import math
import random
from typing import Any

import pytest
import torch

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.scoring.responses import credit_rule
from coca_mindspeed.verl.advantage_step import AdvantageStep, StepShape
from coca_mindspeed.verl.settings import VerlSettings
from tests.verl.configurations import columns

P, G = 3, 4
RIGHT, WRONG, UNGRADABLE = Outcome.RIGHT, Outcome.WRONG, Outcome.UNGRADABLE


def judged(seed: int = 0) -> tuple[list[str], list[dict[str, Any]], torch.Tensor]:
    """Keys, what the reward manager said, and lengths of P * G responses, shuffled."""
    draw = random.Random(seed)
    rows = []
    for group in range(P):
        for session in range(G):
            tokens = draw.randint(4, 9)
            stated = None if draw.random() < 0.2 else draw.randint(0, 10) / 10
            said = columns(
                stated, draw.choice([RIGHT, WRONG]), confidence_tokens=draw.randint(1, tokens - 1), tokens=tokens
            )
            rows.append((f"u{group}_{session}_0", said, tokens))
    draw.shuffle(rows)
    return [key for key, _, _ in rows], [said for _, said, _ in rows], torch.tensor([n for _, _, n in rows])


def step(
    settings: VerlSettings | None = None, stage: int = 0, seed: int = 0, tags: list[dict[str, Any]] | None = None
) -> AdvantageStep:
    keys, rows, lengths = judged(seed)
    return AdvantageStep.of_batch(
        keys=keys,
        tags=tags or [{}] * len(keys),
        rows=rows,
        response_lengths=lengths,
        shape=StepShape(P, G),
        settings=settings or VerlSettings(),
        stage=stage,
    )


@pytest.mark.parametrize("method", ["coca", "rlvr", "joint", "sequential", "rlcr"])
def test_each_row_gets_the_advantages_that_the_credit_rule_gives_it(method):
    settings = VerlSettings.model_validate({"method": {"name": method}})
    found = step(settings)
    keys, rows, lengths = judged()
    by_key = {key: (said, int(length)) for key, said, length in zip(keys, rows, lengths, strict=True)}
    order = [f"u{keys[row].split('_')[0][1:]}_{keys[row].split('_')[1]}_0" for row in found.groups.rows]
    correct = torch.tensor([by_key[key][0]["verdict"] == "right" for key in order]).view(P, G)
    stated = [math.nan if (s := by_key[key][0]["prediction"]["confidence"]) is None else s for key in order]
    credit = credit_rule(settings.method, 0)(
        correct,
        torch.tensor(stated, dtype=torch.float64).view(P, G),
        torch.tensor([by_key[key][0]["confidence_tokens"] for key in order]),
        torch.tensor([by_key[key][1] for key in order]),
        int(lengths.max()),
    )
    for place, row in enumerate(found.groups.rows):
        torch.testing.assert_close(found.advantages[row], credit.tokens[place], rtol=0, atol=0)
        assert int(found.segment_lengths[row]) == int(credit.segment_lengths[place])
    assert found.advantages.abs().sum() > 0


def test_the_stage_decides_what_sequential_rewards():
    settings = VerlSettings.model_validate({"method": {"name": "sequential"}})
    first, second = (step(settings, stage) for stage in (0, 1))
    assert not torch.equal(first.advantages, second.advantages)
    assert first.metrics()["stage"] == 0.0
    assert second.metrics()["stage"] == 1.0


def test_rows_that_fill_up_and_broken_groups_teach_nothing():
    keys, rows, lengths = judged()
    lost = keys.index("u1_2_0")
    keys, rows = [k for i, k in enumerate(keys) if i != lost], [r for i, r in enumerate(rows) if i != lost]
    lengths = torch.cat([lengths[:lost], lengths[lost + 1 :], torch.tensor([1])])
    keys, rows, tags = [*keys, "pad_0_0"], [*rows, {}], [{}] * 11 + [{"is_padding": True}]
    arguments: dict[str, Any] = {"keys": keys, "tags": tags, "rows": rows, "response_lengths": lengths, "stage": 0}
    with pytest.raises(TrainingError, match="1 of 3 groups lack responses"):
        AdvantageStep.of_batch(shape=StepShape(P, G), settings=VerlSettings(), **arguments)
    found = AdvantageStep.of_batch(shape=StepShape(P, G), settings=VerlSettings(broken_groups=1), **arguments)
    for row, key in enumerate(keys):
        if key.startswith(("u1", "pad")):
            assert not found.advantages[row].any()
            assert int(found.segment_lengths[row]) == 0
    assert found.advantages.any()
    assert found.metrics()["group/broken"] == 1.0
    assert len(found.dump(7, 99)) == 2 * G


def test_a_sum_over_tokens_of_the_segment_means_advantages_is_segment_mean():
    """Loss and gradient, off-policy so that the clip bites."""
    settings = VerlSettings.model_validate({"method": {"loss_aggregation": "segment_mean"}})
    found, plain = step(settings), step()
    width = found.advantages.shape[1]
    rows = torch.tensor(found.groups.rows)
    masks = segment_masks(found.credit.segment_lengths, found.response_lengths, width)
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(P * G, width, generator=generator)
    results = []
    for advantages, aggregation in ((found.advantages, "sum"), (plain.advantages, "segment_mean")):
        new = (old + torch.randn(P * G, width, generator=torch.Generator().manual_seed(2))).requires_grad_()
        objective = segment_objective(new, old, advantages[rows], masks, aggregation=aggregation)
        objective.loss.backward()
        results.append((objective.loss.detach(), new.grad))
        assert float(objective.confidence.clipped) > 0
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_the_metrics_have_the_names_of_every_engine_and_leave_out_what_is_undefined():
    metrics = step().metrics()
    assert {"reward/answer", "reward/confidence", "rollout/gesr", "rollout/ece", "rollout/brier"} <= metrics.keys()
    assert {"response/confidence_length", "group/no_confidence_variance_share"} <= metrics.keys()
    assert all(map(math.isfinite, metrics.values()))
    keys = [f"u0_{i}_0" for i in range(G)]
    alike = AdvantageStep.of_batch(
        keys=keys,
        tags=[{}] * G,
        rows=[columns(None, RIGHT)] * G,
        response_lengths=torch.tensor([5] * G),
        shape=StepShape(1, G),
        settings=VerlSettings(),
        stage=0,
    )
    assert {"rollout/auroc", "rollout/ece", "rollout/confidence"}.isdisjoint(alike.metrics())
    assert alike.metrics()["rollout/invalid_share"] == 1.0


def test_an_ungradable_answer_is_counted_and_a_step_without_any_graded_one_ends_the_run():
    keys = [f"u0_{i}_0" for i in range(G)]
    failed = columns(0.5, UNGRADABLE, reason="the grader failed: no sandbox")
    arguments: dict[str, Any] = {
        "keys": keys,
        "tags": [{}] * G,
        "response_lengths": torch.tensor([5] * G),
        "shape": StepShape(1, G),
        "settings": VerlSettings(),
        "stage": 0,
    }
    some = AdvantageStep.of_batch(rows=[failed, *[columns(0.5, RIGHT)] * (G - 1)], **arguments)
    assert some.metrics()["grading/ungradable_share"] == 1 / G
    with pytest.raises(TrainingError, match=r"none of the step's 4 answers could be graded: .*: no sandbox"):
        AdvantageStep.of_batch(rows=[failed] * G, **arguments)


def test_an_ungradable_answer_is_left_out_of_its_group():
    """By hand: verdicts (right, wrong, ungradable, wrong), so GESR is 1/3, and the third row learns nothing."""
    rows = [
        columns(0.5, RIGHT),
        columns(0.5, WRONG),
        columns(0.5, UNGRADABLE, reason="no sandbox"),
        columns(0.5, WRONG),
    ]
    found = AdvantageStep.of_batch(
        keys=[f"u0_{i}_0" for i in range(G)],
        tags=[{}] * G,
        rows=rows,
        response_lengths=torch.tensor([5] * G),
        shape=StepShape(1, G),
        settings=VerlSettings.model_validate({"method": {"advantage_eps": 0.0}}),
        stage=0,
    )
    assert found.credit.gesr.tolist() == [[pytest.approx(1 / 3)]]
    # r_a = (1, 0, 0): mean 1/3, sample deviation 1/sqrt(3)
    expected = [2 / math.sqrt(3), -1 / math.sqrt(3), 0.0, -1 / math.sqrt(3)]
    assert found.advantages[:, -1].tolist() == pytest.approx(expected)
    assert not found.advantages[2].any()
    assert found.metrics()["rollout/accuracy"] == pytest.approx(1 / 3)
    assert [row["correct"] for row in found.dump(1, 1)] == [True, False, None, False]


def test_rows_of_another_reward_manager_are_refused():
    with pytest.raises(TrainingError, match=r"row u0_0_0: no .* in verl's reward_extra_info \['acc'\]: is reward"):
        AdvantageStep.of_batch(
            keys=["u0_0_0", "u0_1_0"],
            tags=[{}, {}],
            rows=[{"acc": 1.0}] * 2,
            response_lengths=torch.tensor([5, 5]),
            shape=StepShape(1, 2),
            settings=VerlSettings(),
            stage=0,
        )


def test_the_dump_shows_what_each_response_stated_earned_and_learned():
    found = step()
    dump = found.dump(3, P)
    assert found.dump(3, 2) == dump[: 2 * G]
    assert len(dump) == P * G
    for place, row in enumerate(dump):
        assert row["step"] == 3
        assert {"confidence", "verdict", "gesr", "confidence_advantage", "answer_advantage"} <= row.keys()
        assert row["gesr"] == pytest.approx(float(found.credit.gesr[place // G]))
