"""The verdict on a trial, and what it shows."""

import json
import re

import pytest

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.scoring.health import LARGEST_LOG_PROB_GAP
from coca_mindspeed.upstream.trial import check_trial
from tests.mindspeed.builders import write


@pytest.mark.parametrize(
    ("gaps", "wrong"),
    [
        ([0.004, 0.006], None),
        ([LARGEST_LOG_PROB_GAP], None),
        ([0.004, 0.13], 2),  # say stale weights
        ([0.13, 0.004], 1),
        ([None], 1),  # NaN
        ([], None),  # at another temperature it is not measured
    ],
)
def test_a_trial_fails_if_the_rollout_has_another_model(tmp_path, capsys, gaps, wrong):
    rows = [{"step": i, "rollout/log_prob_gap": gap} for i, gap in enumerate(gaps, start=1)] or [{"step": 1}]
    write(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if wrong is None:
        check_trial(tmp_path, 4)
        assert "log_prob_gap" in capsys.readouterr().out
    else:
        with pytest.raises(TrainingError, match=r"\[log_prob_gap\]"):
            check_trial(tmp_path, 4)


VERLS = {
    "invalid": {"rollout/invalid_share": 1.0},
    "ungradable": {"grading/ungradable_share": 1.0},
    "cut_off": {"response/cut_off_share": 1.0},
    "one_reward": {"group/no_confidence_variance_share": 1.0, "group/no_answer_variance_share": 1.0},
    "no_gradient": {"actor/grad_norm": 0.0},
    "log_prob_gap": {"rollout/log_prob_gap": 0.3},
}
WELL = {
    "rollout/invalid_share": 0.5,
    "grading/ungradable_share": 0.0,
    "response/cut_off_share": 0.1,
    "group/no_confidence_variance_share": 0.5,
    "group/no_answer_variance_share": 0.5,
    "actor/grad_norm": 0.7,
    "rollout/log_prob_gap": 0.004,
}


@pytest.mark.parametrize("code", [None, *VERLS, "no_steps"])
def test_a_trial_on_verl_is_judged_by_the_same_reasons(tmp_path, code):
    """In the layout of verl's file logger, whose rows also have verl's own metrics."""
    wrong = VERLS.get(code, {})
    rows = [{"step": step, "data": {"perf/throughput": 9.0, **WELL, **wrong}} for step in (1, 2)]
    write(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows if code != "no_steps"))
    dumped = {"question": "q", "response": "r", "confidence": None, "correct": None}
    write(tmp_path / "samples" / "step_000001.jsonl", json.dumps(dumped) + "\n")
    if code is None:
        check_trial(tmp_path, 128)
        return
    with pytest.raises(TrainingError) as raised:
        check_trial(tmp_path, 128)
    assert re.findall(r"\[(\w+)\]$", str(raised.value).partition("; see")[0], re.MULTILINE) == [code]


def test_a_trial_shows_three_responses_and_its_warnings(tmp_path, capsys):
    write(tmp_path / "metrics.jsonl", '{"step": 1, "group/no_answer_variance_share": 1.0, "actor/grad_norm": 0.0}\n')
    rows = [
        {"prompt": f"question {i // 2}", "response": f"response {i}", "confidence": 0.5, "correct": i != 2}
        for i in range(8)
    ]
    write(tmp_path / "samples" / "iteration_000001.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    check_trial(tmp_path, 4)
    shown = capsys.readouterr().out
    assert [f"response {i}" in shown for i in range(8)] == [True, False, True, False, True, False, False, False]
    assert shown.count("right") == 2
    assert "wrong" in shown
    assert "[one_reward]" in shown
    with pytest.raises(TrainingError, match=r"\[one_reward\]"):
        check_trial(tmp_path, 8)
