"""The verdict on a trial, and what it shows."""

import json

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
