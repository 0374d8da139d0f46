"""Health warnings: which metrics are a problem, and when a warning is repeated."""

import json
import math
import tarfile
from pathlib import Path

import pytest
import torch

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.scoring.best import BestValue
from coca_mindspeed.scoring.health import NO_SIGNAL_STEPS, HealthWarnings, gap_problem, health_problems, judge_trial
from coca_mindspeed.scoring.metrics import cut_off

NAMES = {
    "invalid": "rollout/invalid_share",
    "confidence": "group/no_confidence_variance_share",
    "answer": "group/no_answer_variance_share",
    "ungradable": "grading/ungradable_share",
    "cut_off": "response/cut_off_share",
    "entropy": "confidence/entropy",
}
HEALTHY = dict.fromkeys(NAMES.values(), 0.0) | {"confidence/entropy": 0.3}
RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def row(**shares):
    return HEALTHY | {NAMES[name]: share for name, share in shares.items()}


@pytest.mark.parametrize(
    ("shares", "codes"),
    [
        ({}, []),
        ({"invalid": 0.5, "confidence": 0.94, "answer": 0.94, "ungradable": 0.05, "cut_off": 0.5}, []),
        ({"invalid": 0.51}, ["invalid"]),
        ({"confidence": 0.95, "answer": 0.94}, ["no_confidence_signal"]),
        ({"confidence": 0.5, "answer": 1.0}, ["no_answer_signal"]),
        ({"confidence": 0.96, "answer": 0.96}, ["no_signal"]),
        ({"invalid": 1.0, "confidence": 1.0}, ["invalid", "no_confidence_signal"]),
        ({"answer": 1.0, "ungradable": 1.0}, ["no_answer_signal", "ungradable"]),
        ({"ungradable": 0.06}, ["ungradable"]),
        ({"cut_off": 0.51}, ["cut_off"]),
        ({"entropy": 0.1}, []),
        ({"entropy": 0.099, "answer": 0.95}, ["low_entropy", "no_answer_signal"]),
        ({"entropy": 0.001, "confidence": 0.95}, ["no_confidence_signal"]),
        ({"entropy": 0.0, "confidence": 1.0, "answer": 1.0}, ["no_signal"]),
    ],
)
def test_each_segment_and_the_grading_are_looked_at_separately(shares, codes):
    assert list(health_problems([row(**shares)] * NO_SIGNAL_STEPS)) == codes


@pytest.mark.parametrize(
    ("method", "codes"),
    [
        *((method, ["low_entropy"]) for method in (None, "coca", "joint", "caliber")),
        *((method, []) for method in ("rlvr", "rlcr", "dcpo", "log_score")),
    ],
)
def test_a_low_entropy_is_a_problem_where_the_confidence_is_rewarded_and_precedes_the_answer(method, codes):
    rows = [row(entropy=0.01)] * NO_SIGNAL_STEPS
    chosen = method and training_method(method)
    assert list(health_problems(rows, chosen)) == codes
    health = HealthWarnings()
    warned = [health.after_step(step, each, chosen) for step, each in enumerate(rows, 1)]
    assert [warning is not None for warning in warned] == [False] * (NO_SIGNAL_STEPS - 1) + [bool(codes)]


@pytest.mark.parametrize("unknown", [{}, dict.fromkeys(NAMES.values()), dict.fromkeys(NAMES.values(), math.nan)])
@pytest.mark.parametrize("code", ["invalid", "ungradable", "cut_off"])
def test_a_step_without_a_value_silences_no_warning(code, unknown):
    rows = [row(**{code: 1.0})] * (NO_SIGNAL_STEPS - 1)
    assert list(health_problems([*rows, unknown])) == [code]


@pytest.mark.parametrize("rows", [[], [{}], [{}, {"rollout/invalid_share": None}]])
def test_metrics_that_are_not_there_are_no_problem(rows):
    assert health_problems(rows) == {}


@pytest.mark.parametrize(
    ("known", "metric", "value", "better"),
    [
        (None, "eval/brier", 0.9, True),
        (("eval/brier", 0.2), "eval/brier", 0.1, True),
        (("eval/brier", 0.2), "eval/brier", 0.3, False),
        (("eval/auroc", 0.6), "eval/auroc", 0.7, True),
        (("eval/auroc", 0.6), "eval/auroc", math.nan, False),
        # A resumed run may choose another metric; the value of the earlier one says nothing about it.
        (("eval/brier", 0.1), "eval/ece", 0.3, True),
        (("eval/auroc", 0.9), "eval/accuracy", 0.2, True),
        (("eval/auroc", 0.9), "eval/brier", 0.95, True),
    ],
)
def test_a_value_is_compared_with_the_best_of_its_own_metric(tmp_path, known, metric, value, better):
    if known is not None:
        earlier = BestValue(tmp_path / "best", known[0])
        with earlier.replace(1, dict([known])):
            pass
    assert BestValue(tmp_path / "best", metric).improves({metric: value}) == better


def test_ungradable_golds_are_seen_while_the_confidence_still_learns():
    """All golds unreadable: accuracy 0 and equal answer rewards, but confidences that differ."""
    rows = [row(confidence=0.1, answer=1.0, ungradable=1.0) | {"rollout/accuracy": 0.0}] * NO_SIGNAL_STEPS
    assert set(health_problems(rows)) == {"no_answer_signal", "ungradable"}


def metrics_of_runs(archive):
    """Run -> its rows, from a published archive."""
    with tarfile.open(RESULTS / archive) as files:
        for member in files:
            if member.name.endswith("metrics.jsonl"):
                content = files.extractfile(member)
                rows = [json.loads(line) for line in content.read().splitlines()]
                yield member.name, [row for row in rows if row["step"] > 0]


@pytest.mark.parametrize(
    ("archive", "healthy", "ended"), [("long/answers.tar.xz", 5, 3), ("smollm2/jobs.tar.xz", 4, 2)]
)
def test_a_confidence_that_becomes_one_number_is_seen_before_its_rewards_are_equal(archive, healthy, ended):
    """In every archived run: none with the bonus is warned of, and the others before they learn nothing more."""
    found = {}
    for run, rows in metrics_of_runs(archive):
        windows = [rows[end - NO_SIGNAL_STEPS : end] for end in range(NO_SIGNAL_STEPS, len(rows) + 1)]
        codes = [health_problems(window).keys() for window in windows]
        found[run] = [
            next((end for end, each in enumerate(codes) if code in each), None)
            for code in ("low_entropy", "no_confidence_signal")
        ]
    with_bonus = [run for run in found if "entropy" in run or "/coca/" in run or "/coca_group/" in run]
    assert len(with_bonus) == healthy
    assert all(found[run] == [None, None] for run in with_bonus)
    equal = [steps for steps in found.values() if steps[1] is not None]
    assert len(equal) == ended
    assert all(steps[0] + 4 <= steps[1] for steps in equal)


INVALID, EQUAL = {"rollout/invalid_share": 1.0}, dict.fromkeys((NAMES["confidence"], NAMES["answer"]), 1.0)
NO_GRADIENT, GAP = {"actor/grad_norm": 0.0}, "rollout/log_prob_gap"
WELL = HEALTHY | {"actor/grad_norm": 0.3, GAP: 0.004}


@pytest.mark.parametrize(
    ("steps", "groups", "failures", "warnings"),
    [
        ([{}, {}], 8, [], []),
        ([INVALID, INVALID], 8, ["invalid"], []),
        ([INVALID, {"rollout/invalid_share": 0.99}], 8, [], []),
        ([{"grading/ungradable_share": 1.0}] * 2, 8, ["ungradable"], []),
        ([{"response/cut_off_share": 1.0}] * 2, 8, ["cut_off"], []),
        ([NO_GRADIENT, NO_GRADIENT], 8, ["no_gradient"], []),
        ([NO_GRADIENT, {}], 8, [], []),
        ([NO_GRADIENT, NO_GRADIENT], 4, ["no_gradient"], []),
        ([EQUAL, EQUAL], 8, ["one_reward"], []),
        ([EQUAL | NO_GRADIENT] * 2, 8, ["one_reward", "no_gradient"], []),
        ([EQUAL | NO_GRADIENT] * 2, 7, [], ["one_reward", "no_gradient"]),
        ([{NAMES["answer"]: 1.0}] * 2, 8, [], []),  # the confidences still learn
        ([{NAMES["answer"]: 1.0, NAMES["confidence"]: None}] * 2, 8, ["one_reward"], []),  # rlvr
        ([{GAP: 0.05}, {}], 8, [], []),
        ([{}, {GAP: 0.17}], 8, ["log_prob_gap"], []),
        ([{GAP: None}, {}], 8, ["log_prob_gap"], []),
        ([INVALID | EQUAL | NO_GRADIENT | {"response/cut_off_share": 1.0}] * 2, 16,
         ["invalid", "cut_off", "one_reward", "no_gradient"], []),
    ],
)  # fmt: skip
def test_what_a_trial_fails_by(steps, groups, failures, warnings):
    verdict = judge_trial([WELL | step for step in steps], groups)
    assert (list(verdict.failures), list(verdict.warnings)) == (failures, warnings)


def test_a_format_warm_up_that_a_trial_leaves_out_softens_its_verdict():
    rows = [WELL | INVALID | EQUAL | NO_GRADIENT] * 2
    verdict = judge_trial(rows, 16, warm_up_left_out=True)
    assert (verdict.failures, list(verdict.warnings)) == ({}, ["invalid", "one_reward", "no_gradient"])
    cut = [row | {"response/cut_off_share": 1.0} for row in rows]
    assert list(judge_trial(cut, 16, warm_up_left_out=True).failures) == ["cut_off"]


def test_the_gap_of_log_probs_is_warned_of_all_along():
    health, course = HealthWarnings(), [0.17] * 3 + [0.001] * 10 + [0.06, 0.001]
    said = [step for step, gap in enumerate(course, start=1) if health.after_step(step, WELL | {GAP: gap})]
    assert said == [1, 14]


def test_responses_that_were_cut_off():
    ids, lengths = torch.tensor([[5, 6, 7], [5, 6, 2], [5, 2, 0], [0, 0, 0]]), torch.tensor([3, 3, 2, 0])
    assert cut_off(ids, lengths, 3, [2]).tolist() == [True, False, False, False]
    assert cut_off(ids[:, :0], torch.zeros(4, dtype=torch.int64), 3, [2]).tolist() == [False] * 4


def warned(course, problem="ungradable"):
    """The steps at which a run with such shares of one problem, step by step, warns."""
    health = HealthWarnings()
    return [step for step, share in enumerate(course, start=1) if health.after_step(step, row(**{problem: share}))]


@pytest.mark.parametrize(
    ("course", "steps"),
    [
        ([0.9] * 4, []),
        ([0.9] * 20, [5]),
        ([1.0] * 2, [2]),  # the first steps are judged as a trial
        ([1.0] * 20, [2]),
        ([0.9, 1.0, 1.0, 1.0, 0.0], [5]),
        ([0.0] * 10 + [1.0] * 10, [11]),
        # Seen until step 14, while a bad step is among the last five; gone; back at step 31.
        ([0.9] * 10 + [0.0] * 20 + [1.0] * 10, [5, 31]),
        # On the threshold, now above and now below it: said once.
        ([0.06] * 10 + [0.04, 0.06] * 20, [5]),
    ],
)
def test_a_warning_comes_again_with_its_problem_and_no_more_often(course, steps):
    assert warned(course) == steps


def test_another_problem_is_said_beside_one_that_was():
    health = HealthWarnings()
    said = [health.after_step(step, row(confidence=1.0)) for step in range(1, 8)]
    said += [health.after_step(step, row(confidence=1.0, ungradable=1.0)) for step in range(8, 15)]
    spoken = [text for text in said if text]
    assert len(spoken) == 2
    assert "graded" in spoken[1]
    assert "confidence segments" not in spoken[1]


def gap(name, difference, error=0.01):
    return {f"{name}/accuracy": 0.4, f"{name}/confidence": 0.4 + difference, f"{name}/gap_error": error}


@pytest.mark.parametrize(
    ("first_sight", "repeated", "held_out", "found"),
    [
        ((0.0,), None, (0.15,), True),
        ((0.0,), None, (-0.15,), True),
        ((0.3,), None, (0.35,), False),  # the same error on both is no failure on new questions
        (None, (0.0,), (0.15,), True),
        ((0.15,), (0.0,), (0.15,), True),
        ((0.0,), None, (0.12, 0.02), False),  # the interval reaches below .1
        ((0.0, 0.2), None, (0.15,), False),
        (None, None, (0.5,), False),
        ((0.0,), None, None, False),
        ((0.0, None), None, (0.5,), False),  # one question: no interval
    ],
)
def test_a_confidence_that_does_not_hold_on_held_out_questions(first_sight, repeated, held_out, found):
    step = {}
    for name, given in (("first_sight", first_sight), ("repeated", repeated)):
        step |= gap(name, *given) if given else {}
    rows = [step] * 4 + [step | (gap("held_out", *held_out) if held_out else {})]
    assert set(gap_problem(rows)) == ({"held_out_gap"} if found else set())
    assert gap_problem([*rows, step]) == gap_problem(rows)  # the last evaluation stands


def test_the_steps_up_to_the_evaluation_are_compared():
    """Five steps of standard error .1 have one of .045."""
    noisy = gap("first_sight", 0.0, error=0.1)
    assert not gap_problem([gap("held_out", 0.25) | noisy])
    assert gap_problem([noisy] * 4 + [gap("held_out", 0.25) | noisy])
    assert not gap_problem([gap("first_sight", 0.25)] * 5 + [noisy, gap("held_out", 0.25)] + [noisy] * 5)


def test_the_gap_is_said_once_until_an_evaluation_refutes_it():
    health, said = HealthWarnings(), []
    for step in range(1, 61):
        held_out = {10: gap("held_out", 0.3), 20: gap("held_out", 0.3), 30: gap("held_out", 0.0)}
        held_out |= {50: gap("held_out", 0.3)}
        if health.after_step(step, HEALTHY | gap("first_sight", 0.0) | held_out.get(step, {})):
            said.append(step)
    assert said == [10, 50]
