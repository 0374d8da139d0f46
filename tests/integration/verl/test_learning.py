"""Trainings of the demo's warmed-up model on verl: does the stated confidence learn what it is rewarded for?

``make test-verl-learning`` names the model, which is right half the time and sure of it always, and prints the table.
A seed draws the questions and their order; responses are drawn as requests arrive, so no two runs are quite the same.
"""

import os
from pathlib import Path
from statistics import mean

import pytest

from tests.integration.verl import loop, tiny

MODEL = os.environ.get("VERL_LEARNING_MODEL", "")
STEPS, PROMPTS = 100, 8
pytestmark = [
    pytest.mark.skipif(not MODEL, reason="trainings of 60 and 100 steps; they run by `make test-verl-learning`"),
    pytest.mark.timeout(7200),
]

SETTINGS = {
    "coca__method": {"advantage_eps": 0.05, "max_confidence_tokens": 6, "confidence_decimals": 2},  # as in the demo
    "coca__samples_interval": 0,
    "actor_rollout_ref__actor__optim__lr": 3e-4,  # more would unlearn the answers on so few responses a step
    "data__train_batch_size": PROMPTS,
    "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 64,
    "trainer__total_training_steps": STEPS,
    "trainer__test_freq": STEPS,
    "trainer__val_before_train": True,
}


def trained(directory, seed, model=MODEL, **changes):
    """Metrics by step of a training in a directory."""
    tiny.widen_model(Path(model).absolute(), directory / "model")
    tiny.write_questions(directory, "coca", train=PROMPTS * STEPS, evaluate=128, seed=seed)
    run = directory / "run"
    seeds = {"data__seed": seed, "actor_rollout_ref__rollout__seed": seed}
    config = tiny.configuration(directory, run, **{**SETTINGS, **seeds, **changes})
    assert loop.start(config).wait(7000) == 0, loop.log_of(run)[-6000:]
    return loop.metrics(run)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_confidence_reward_rises_and_the_calibration_error_halves(seed, tmp_path):
    metrics = trained(tmp_path, seed)
    before, after = ([metrics[step] for step in steps] for steps in (range(1, 6), range(STEPS - 4, STEPS + 1)))
    reward = [mean(step["reward/confidence"] for step in steps) for steps in (before, after)]
    error = [mean(step["rollout/ece"] for step in steps) for steps in (before, after)]
    held_out = [
        [metrics[step][f"eval/{name}"] for step in (0, STEPS)] for name in ("ece", "auroc", "brier", "accuracy")
    ]
    cells = [f"{first:.3f} to {last:.3f}" for first, last in (reward, error, *held_out)]
    print(f"\n| {seed} | {' | '.join(cells)} |")
    assert reward[1] > reward[0]
    assert error[1] <= error[0] / 2


def test_the_entropy_bonus_keeps_the_confidence_from_becoming_one_number(tmp_path):
    """From the model that the demo has trained without a bonus: its confidence narrows further, or widens again."""
    model, curves = Path(MODEL).parent / "model", {}
    for bonus in (0.0, 0.02):
        changes = {"coca__method": {**SETTINGS["coca__method"], "entropy_bonus": bonus}}
        changes |= {"trainer__total_training_steps": 60, "trainer__test_freq": 60}
        metrics = trained(tmp_path / str(bonus), 1, model, **changes)
        names = ("confidence/entropy", "group/no_confidence_variance_share", "rollout/ece", "rollout/accuracy")
        tens = [range(first, first + 10) for first in range(1, 61, 10)]
        curves[bonus] = {name: [mean(metrics[step][name] for step in steps) for steps in tens] for name in names}
        for name, values in curves[bonus].items():
            print(f"\n| {bonus} | {name} | {' | '.join(f'{value:.3f}' for value in values)} |")
    last = {bonus: curve["confidence/entropy"][-1] for bonus, curve in curves.items()}
    assert last[0.0] < last[0.02] / 2
    equal = [curves[bonus]["group/no_confidence_variance_share"][-1] for bonus in (0.0, 0.02)]
    assert equal[1] < equal[0]
