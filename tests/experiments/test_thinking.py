"""The study of thinking: routing between answers at once and behind a thought, the rule, and its archive."""

import json

import numpy as np
import pytest
import yaml

from coca_mindspeed.evaluation.predictions import Prediction
from experiments.__main__ import main
from experiments.forms import write_archive
from experiments.reproduce.plan import plan_path
from experiments.thinking import Arm, add_runs, read_archive, route, rule


def arm(confidences, correct, tokens, *, at_first=0.5, at_last=0.5, still_open=(0.0, 0.0)):
    """40 steps; the confidence is known after 6 tokens."""
    curve = {
        "accuracy": np.repeat([at_first, at_last], 20),
        "open": np.repeat(np.array(still_open, float), 20),
    }
    answers = [
        Prediction(str(i), "recurrences", "", "", stated, right, 6, tokens=tokens)
        for i, (stated, right) in enumerate(zip(confidences, correct, strict=True))
    ]
    return Arm(curve, ["+"] * len(answers), answers)


SURE = [1.0] * 5 + [0.2] * 5


def shifted(cut, shift):
    """Intervals over seeds need values that differ."""
    moved = {"at_first": -shift, "at_last": shift, "still_open": (-shift, shift)}
    return {name: np.add(value, moved[name]) for name, value in cut.items()}


def test_routing_by_hand():
    """Five questions are right at once and stated so, all are right behind a thought."""
    direct, thinking = arm(SURE, [True] * 5 + [False] * 5, 9), arm([1.0] * 10, [True] * 10, 70)
    routed = route(direct, thinking)
    # Half of the questions think, after a confidence of 6 tokens; a lower threshold answers all of them at once.
    half = 0.5 * 9 + 0.5 * (6 + 70)
    mix = 0.5 + 0.5 * (half - 9) / (70 - 9)
    assert routed.tokens == pytest.approx(half / 70)
    assert routed.gain == pytest.approx(np.mean([0.0] * 2 + [1 - mix] * 7))


@pytest.mark.parametrize(
    ("cut", "outcomes"),
    [
        ({"at_first": 0.1, "at_last": 0.4, "still_open": (0.8, 0.1)}, [True, True, True]),
        ({"at_first": 0.6, "at_last": 0.1, "still_open": (0.1, 0.8)}, [False, False, False]),
    ],
)
def test_the_rule(cut, outcomes):
    def seeds(make):
        return {seed: make(seed / 1000) for seed in range(3)}

    right = [True] * 8 + [False] * 2
    arms = {
        "direct": seeds(lambda x: arm([1.0 - x] * 5 + [0.2] * 5, [True] * 5 + [False] * 5, 9)),
        "thinking": seeds(lambda x: arm([0.9 - x] * 8 + [0.1 + x] * 2, right, 70)),
        "long": seeds(lambda x: arm([0.8 - x] * 10, right, 70)),
        "cut off": seeds(lambda x: arm(SURE, right, 48, **shifted(cut, x))),
    }
    arms["thinking"][2] = arm([0.9] * 7 + [0.1] * 3, right, 70)  # the AUROC varies over the seeds
    held = {name: outcome for name, _, outcome in rule(arms)}
    assert [outcome for name, outcome in held.items() if name.startswith("2")] == outcomes
    assert [outcome for name, outcome in held.items() if name.startswith("1")] == [True, True]


def test_an_archive_keeps_an_arm(tmp_path):
    contents = {
        "seed_3/cut_off/cell.json": json.dumps({"name": "cut off", "seed": 3}).encode(),
        "seed_3/cut_off/metrics.csv": b"step,accuracy,open\n1,.5,.25\n",
        "seed_3/cut_off/answers.csv": b"id,kind,confidence,correct,opening,tokens\na,+,0.5,1,6,70\nb,*,,0,,48\n",
    }
    write_archive(tmp_path / "runs.tar.xz", contents)
    read = read_archive(tmp_path / "runs.tar.xz")["cut off"][3]
    assert [(a.confidence, a.correct, a.tokens_to_confidence, a.tokens) for a in read.answers] == [
        (0.5, True, 6, 70),
        (None, False, None, 48),
    ]
    assert (read.kinds, read.first("open")) == (["+", "*"], 0.25)


def test_the_plan_from_start_to_archive(tmp_path):
    plan = yaml.safe_load(plan_path("thinking").read_text())
    for setting in plan["settings"].values():
        setting["overrides"] += ["warm_up.steps=2", "trainer.steps=2", "rollout.prompts=2", "evaluation.preflight=0"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, "train_questions": 100, "evaluate_questions": 8}))
    arguments = [
        "--plan",
        str(tmp_path / "plan.yaml"),
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--output",
        str(tmp_path / "runs"),
    ]
    assert main(["reproduce", *arguments]) == 0
    add_runs(tmp_path / "runs.tar.xz", tmp_path / "runs")
    arms = read_archive(tmp_path / "runs.tar.xz")
    assert set(arms) == {"thinking", "direct", "cut off", "long"}
    lengths = {name: max(answer.tokens for answer in of_seeds[0].answers) for name, of_seeds in arms.items()}
    assert lengths["direct"] <= 17 < lengths["cut off"] <= 49 < lengths["thinking"] <= 73
    assert np.isfinite(arms["thinking"][0].curve["open"]).all()
    assert np.isnan(arms["long"][0].curve["open"]).all()
