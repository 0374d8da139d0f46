"""Metrics, sample rows and columns of a rollout, by hand."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import METHODS, method_settings
from coca_mindspeed.algorithm.methods.settings import OwnMethodSettings
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.scoring.health import health_problems
from coca_mindspeed.scoring.metrics import WeightedMean, rollout_metrics, sight_metrics, values, weighted_means
from coca_mindspeed.scoring.responses import held_out_gap
from coca_mindspeed.scoring.rollout import SCORE_COLUMNS, Graded, Scored, confidence_log_probs, correctness

N = math.nan
CORRECT = [1, 0, 1, 1]
CONFIDENCE = [0.5, 0.0, 0.9, N]
LENGTHS = [2, 3, 1, 4]
_HALVES = (slice(0, 1), slice(1, 4))


def scored(correct=CORRECT, stated=CONFIDENCE, lengths=LENGTHS, after=None, ends=None):
    """One confidence token each."""
    stated = [stated] if after is None else [stated, after]
    columns = {
        "stated_confidence": torch.tensor(stated, dtype=torch.float64).T,
        "correct": torch.tensor(correct, dtype=torch.float64)[:, None],
        "confidence_length": torch.ones(len(correct), 1, dtype=torch.int64),
        "segment_ends": torch.tensor(ends or [[1, length] for length in lengths]),
    }
    return Scored.from_columns(columns)


def credited(*given, method="coca", stage=0, eps=1e-6, **known):
    """Groups of two."""
    return scored(*given, **known).give_credit(
        CreditRule(method_settings(method, advantage_eps=eps), stage), 2, width=4
    )


def graded(verdicts, answers=("a", "b", "c", "d")):
    """The same responses with their texts."""
    return Graded(
        **{**vars(scored()), "correct": correctness(verdicts)},
        texts=list("abcd"),
        answers=list(answers),
        records=[Record(name, "d", "math", "4*2=", "8") for name in "abcd"],
        verdicts=verdicts,
        grading_seconds=0.0,
    )


def test_restated_questions_are_wrong_in_a_new_object():
    given = graded([Verdict(Outcome.RIGHT)] * 3 + [Verdict(Outcome.WRONG)], ["8", r"\boxed{4*2}", "8", "4*2"])
    rewarded = given.reject_unevaluated()
    assert (given.correct.tolist(), rewarded.correct.tolist()) == ([1, 1, 1, 0], [1, 0, 1, 0])
    assert [verdict.correct for verdict in rewarded.verdicts] == [True, False, True, False]
    assert (given.unevaluated, rewarded.unevaluated) == (0, 1)


def test_credit_needs_whole_groups():
    with pytest.raises(ValueError, match="4 responses"):
        scored().give_credit(CreditRule(method_settings()), 3)


@pytest.mark.parametrize("verdicts", [torch.ones(3), torch.ones(4, 1), torch.ones(4, dtype=torch.int64)])
def test_there_is_one_verdict_for_each_response(verdicts):
    with pytest.raises(ValueError, match="correct should be float"):
        replace(scored(), correct=verdicts)


def test_no_stage_can_be_changed():
    of_rollout = credited()
    for stage, field in ((of_rollout, "credit"), (of_rollout.scored, "correct")):
        with pytest.raises(FrozenInstanceError):
            setattr(stage, field, None)


def test_metrics_by_hand():
    expected = {
        "grading/ungradable_share": 0.0,
        "group/dropped_share": 0.0,
        "reward/answer": 0.75,
        "reward/confidence": (0 - 0.25 - 0.01 - 1) / 4,
        "rollout/gesr": 0.75,
        "rollout/invalid_share": 0.25,
        "rollout/accuracy": 0.75,
        "response/length": 2.5,
        "response/confidence_length": 1.0,
        "response/answer_length": 1.5,
        "group/no_confidence_variance_share": 0.0,
        "group/no_answer_variance_share": 0.5,
        "rollout/confidence": 1.4 / 3,
        "rollout/ece": (0.5 + 0 + 0.1) / 3,
        "rollout/auroc": 1.0,
        "rollout/brier": (0.25 + 0 + 0.01) / 3,
    }
    found = values(rollout_metrics(credited()))
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_questions_at_first_sight_and_repeated_ones_by_hand():
    """Only valid and graded responses count; the third question has none."""
    rollout = credited([1, 0, 1, 1, N, 1], [0.5, 0.0, 0.9, N, 0.4, N], [1] * 6)
    metrics = sight_metrics(rollout.scored, [False, True, False])
    assert metrics["first_sight/accuracy"] == (0.5, 2)
    assert metrics["first_sight/confidence"] == (0.25, 2)
    assert metrics["repeated/accuracy"] == (1.0, 1)
    assert metrics["repeated/confidence"] == (pytest.approx(0.9), 1)
    assert metrics["repeated/gap_error"].weight == 0  # of one question
    assert sight_metrics(rollout.scored, [False] * 3)["repeated/accuracy"].weight == 0
    # Differences .5 - 1 and 0 of one question, -.1 of another; their mean is -.2.
    both = sight_metrics(rollout.scored, [False] * 3)
    assert both["first_sight/gap_error"].value == pytest.approx(math.sqrt(2 * (0.1**2 + 0.1**2)) / 3)


def test_held_out_answers_are_grouped_by_question():
    rows = [("a", True, 0.5), ("a", False, 0.0), ("b", True, 0.9), ("b", True, None), ("c", None, 0.4)]
    answers = [Prediction(id, "d", "?", "", confidence, correct, None) for id, correct, confidence in rows]
    rollout = credited([1, 0, 1, 1, N, 1], [0.5, 0.0, 0.9, N, 0.4, N], [1] * 6)
    expected = {k.replace("first_sight", "held_out"): m for k, m in sight_metrics(rollout.scored, [False] * 3).items()}
    assert held_out_gap(answers) == {name: mean for name, mean in expected.items() if name.startswith("held_out")}


def test_without_held_out_answers_the_gap_is_undefined():
    metrics = held_out_gap([])
    assert {"held_out/accuracy", "held_out/confidence", "held_out/gap_error"} <= metrics.keys()
    assert all(math.isnan(mean.value) and mean.weight == 0 for mean in metrics.values())


def test_ungradable_answers_are_left_out_and_counted():
    """Three groups of two: all gradable, one ungradable (dropped), both ungradable (dropped)."""
    metrics = rollout_metrics(credited([1, 0, 1, N, N, N], [0.5, 0.0, 0.9, 0.2, 0.3, N], [1] * 6))
    # Right, wrong and right: confidences .5, 0 and .9 of answers that were graded.
    assert metrics["rollout/accuracy"] == (pytest.approx(2 / 3), 3)
    assert metrics["reward/answer"] == metrics["rollout/accuracy"]
    assert metrics["rollout/brier"] == (pytest.approx((0.25 + 0 + 0.01) / 3), 3)
    assert metrics["rollout/auroc"] == (1.0, 3)
    assert metrics["reward/confidence"] == (pytest.approx(-0.125), 2)
    assert metrics["rollout/gesr"] == (0.5, 1)
    assert metrics["group/no_answer_variance_share"] == (0.0, 1)
    assert metrics["group/dropped_share"] == (pytest.approx(2 / 3), 3)
    assert metrics["grading/ungradable_share"] == (0.5, 6)
    # Metrics that do not depend on verdicts are over all responses.
    assert metrics["rollout/confidence"] == (pytest.approx(1.9 / 5), 5)
    assert metrics["rollout/invalid_share"] == (pytest.approx(1 / 6), 6)


@pytest.mark.filterwarnings("error")
def test_a_batch_without_a_gradable_answer_is_undefined_and_not_zero():
    metrics = rollout_metrics(credited([N] * 4))
    undefined = {name for name, mean in metrics.items() if mean.weight == 0}
    assert {"reward/answer", "reward/confidence", "rollout/accuracy", "rollout/gesr", "rollout/ece"} <= undefined
    assert metrics["grading/ungradable_share"] == (1.0, 4)
    assert metrics["group/dropped_share"] == (1.0, 2)


def test_the_segments_of_answer_first_responses():
    rollout = credited(method="rlcr")
    metrics = values(rollout_metrics(rollout))
    assert (metrics["response/answer_length"], metrics["response/confidence_length"]) == (1, 1.5)


def test_the_second_confidence_has_metrics_and_a_column_of_its_own():
    ends = [[1, 1, 2], [1, 2, 3], [0, 0, 1], [1, 2, 4]]
    rollout = credited(after=[1.0, 0.0, 1.0, N], ends=ends, method="caliber", stage=1, eps=0.0)
    metrics = values(rollout_metrics(rollout))
    assert (metrics["rollout/ece_after"], metrics["rollout/brier_after"], metrics["rollout/auroc_after"]) == (0, 0, 1)
    assert metrics["rollout/brier"] == pytest.approx((0.25 + 0 + 0.01) / 3)
    assert metrics["response/confidence_after_length"] == (1 + 1 + 1 + 2) / 4
    rows = rollout.rows(range(4))
    assert [row["confidence_after"] for row in rows] == [1.0, 0.0, 1.0, None]
    up = 1 / math.sqrt(2)
    assert rollout.token_advantages[1].tolist() == pytest.approx([-up, -up, 0, 0])  # second confidences: 0 and 0


def test_a_segment_that_earns_nothing_has_no_share_of_groups_and_is_not_warned_of():
    metrics = values(rollout_metrics(credited(method="log_score")))
    assert "group/no_answer_variance_share" not in metrics
    assert health_problems([{**metrics, "group/no_confidence_variance_share": 0.2}] * 5) == {}
    assert set(health_problems([{"group/no_confidence_variance_share": 1.0}])) == {"no_confidence_signal"}


def test_undefined_metrics_have_no_weight():
    metrics = rollout_metrics(credited([1, 1], [N] * 2, [1, 1]))
    for name in ("rollout/ece", "rollout/auroc", "rollout/brier", "rollout/confidence"):
        assert math.isnan(metrics[name].value)
        assert metrics[name].weight == 0
    assert metrics["rollout/invalid_share"] == WeightedMean(1.0, 2)
    assert metrics["reward/confidence"] == WeightedMean(-1.0, 2)


@pytest.mark.parametrize("name", ["reward/answer", "reward/confidence", "rollout/brier", "rollout/confidence"])
def test_weighted_means_of_batches_are_the_mean_of_the_whole(name):
    halves = [slice(0, 2), slice(2, 4)]
    parts = [rollout_metrics(credited(CORRECT[h], CONFIDENCE[h], LENGTHS[h])) for h in halves]
    whole = rollout_metrics(credited())[name]
    assert weighted_means(parts)[name] == (pytest.approx(whole.value), whole.weight)


def test_a_batch_without_entries_does_not_make_the_mean_of_the_others_undefined():
    """Of a step's mini-batches, one may have no gradable answer."""
    parts = [rollout_metrics(credited([N] * 4)), rollout_metrics(credited())]
    assert math.isnan(parts[0]["rollout/accuracy"].value)
    assert weighted_means(parts)["rollout/accuracy"] == (0.75, 4)
    assert math.isnan(weighted_means(parts[:1])["rollout/accuracy"].value)


def test_advantages_of_the_tokens():
    up = 1 / math.sqrt(2)
    expected = [
        [up, up, 0, 0],
        [-up, -up, -up, 0],
        [up, 0, 0, 0],
        [-up, 0, 0, 0],
    ]  # the last two answers are both right
    torch.testing.assert_close(credited(eps=0.0).token_advantages, torch.tensor(expected))


class WithBonus(OwnMethodSettings):
    reads_log_probs = True


def bonus_rule(bonus=0.1, **choices):
    return CreditRule(method_settings(advantage_eps=0.0, entropy_bonus=bonus, **choices))


def test_log_probs_of_the_confidence_alone():
    """The sum does not depend on the text behind a response, nor on the place of its confidence."""
    log_probs = torch.tensor([[-1.0, -2.0, -4.0, N], [-8.0, N, N, N]])
    ends = torch.tensor([[2, 3], [0, 1]])
    found, last = confidence_log_probs(bonus_rule(), log_probs, ends), CreditRule(WithBonus(method=METHODS["rlcr"]))
    assert (found.tolist(), found.dtype) == ([-3.0, 0.0], torch.float64)
    assert confidence_log_probs(last, log_probs, ends).tolist() == [-4.0, -8.0]
    assert confidence_log_probs(bonus_rule(bonus=0.0), log_probs, ends) is None
    assert confidence_log_probs(bonus_rule(), None, ends) is None
    with pytest.raises(ValueError, match="at most 2, found"):
        confidence_log_probs(bonus_rule(), log_probs[:, :2], ends)


@pytest.mark.parametrize("separate", [True, False])
def test_the_bonus_is_of_valid_confidences_alone(separate):
    """First group: GESR 1/2, Brier -(.5 - .5)^2 = 0 and -(0 - .5)^2 = -.25, log pi -1 and -5, so .1 and .25.

    Second group: one valid response of two.  In the paper's form their rewards are -.01 + .2 and -1: the improbable
    invalid one earns no bonus.
    """
    responses, rule = scored(), bonus_rule(separate_format=separate)
    log_probs = torch.tensor([[-1.0, -90.0, N, N], [-5.0, 0.0, 0.0, N], [-2.0, N, N, N], [-99.0, 0.0, 0.0, 0.0]])
    rollout = responses.give_credit(rule, 2, log_probs=confidence_log_probs(rule, log_probs, responses.segment_ends))
    up = 1 / math.sqrt(2)
    torch.testing.assert_close(rollout.token_advantages[:, 0], torch.tensor([-up, up, up, -up]))
    torch.testing.assert_close(rollout.token_advantages[:2, 1], torch.tensor([up, -up]))
    assert rollout.credit.confidence_reward.flatten().tolist() == pytest.approx([0.0, -0.25, -0.01, -1.0])


@pytest.mark.parametrize("value", [N, -math.inf])
def test_log_probs_that_are_not_finite_are_refused_where_they_count(value):
    rule = bonus_rule()
    with pytest.raises(ValueError, match="log_probs"):
        scored().give_credit(rule, 2, log_probs=torch.tensor([-1.0, value, -1.0, -1.0]))
    scored().give_credit(rule, 2, log_probs=torch.tensor([-1.0, -1.0, -1.0, value]))  # of an invalid response


@pytest.mark.parametrize("twice", [False, True])
def test_scores_as_columns_and_back(twice):
    given = scored([1, N, 1, 0], [0.83, N, 0.1, 1.0], after=[1.0, 0.1, N, 0.83] if twice else None)
    columns = given.columns()
    assert {name: column.dtype for name, column in columns.items()} == SCORE_COLUMNS
    assert [column.shape[1] for column in columns.values()] == [1 + twice, 1, 1, 2]
    sent = {name: column if column.is_floating_point() else column.int() for name, column in columns.items()}
    parts = [Scored.from_columns({name: column[rows] for name, column in columns.items()}) for rows in _HALVES]
    for restored in (Scored.from_columns(sent), Scored.joined(parts)):
        for name in ("stated", "stated_after", "correct", "confidence_lengths", "segment_ends", "lengths"):
            if (expected := getattr(given, name)) is None:
                assert getattr(restored, name) is None
            else:
                torch.testing.assert_close(getattr(restored, name), expected, rtol=0, atol=0, equal_nan=True)


def test_rows():
    """Undefined values are null: of these groups the first has one gradable answer, and is dropped."""
    verdicts = [Verdict(Outcome.RIGHT), Verdict(Outcome.UNGRADABLE, "no sandbox"), *[Verdict(Outcome.RIGHT)] * 2]
    rows = graded(verdicts).give_credit(CreditRule(method_settings()), 2).rows(range(4))
    assert [row["correct"] for row in rows] == [True, None, True, True]
    assert [row["gesr"] for row in rows] == [None, None, 1.0, 1.0]
    assert [row["confidence_reward"] is None for row in rows] == [True, True, False, False]
    assert [(row["confidence_advantage"], row["answer_advantage"]) for row in rows[:2]] == [(0.0, 0.0)] * 2
    assert (rows[1]["response"], rows[1]["verdict"], rows[1]["reason"]) == ("b", "ungradable", "no sandbox")
    assert [(row["id"], row["question"], row["gold"]) for row in rows] == [(name, "4*2=", "8") for name in "abcd"]
    first, last = credited(stated=[0.3, 0.0, 0.9, N], eps=0.0).rows([0, 3])
    up = pytest.approx(1 / math.sqrt(2))
    expected = {"confidence": 0.3, "correct": True, "gesr": 0.5, "confidence_reward": pytest.approx(-0.04)}
    expected |= {"confidence_advantage": up, "answer_advantage": up, "tokens": 2, "confidence_tokens": 1}
    assert first == expected
    assert (last["confidence"], last["gesr"], last["confidence_reward"]) == (None, 1.0, -1.0)
