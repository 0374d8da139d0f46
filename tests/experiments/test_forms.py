"""The study of forms: figures of an archive, and the rule that chooses a form."""

import json
import math

import numpy as np
import pytest

from coca_mindspeed.algorithm.methods import method_settings
from experiments.forms import FormRun, by_form, choose, mean_row, read_archive, write_archive

PAPER = {"advantage_eps": 1e-6, "confidence_decimals": None, "separate_format": False}
SCRIPTS = {**PAPER, "separate_format": True}
DEFAULT = "scripts, two decimals"
NAMED = {**SCRIPTS, "advantage_eps": 0.05, "entropy_bonus": 0.02}


def training(name, seed, settings, *, confidence, right=8):
    """100 steps; ten sums, of which ``right`` are answered right, with one confidence, and two wrong products at .1."""
    curve = {
        "step": np.arange(1, 101.0),
        "entropy": np.linspace(1, 0, 100),
        "equal": (np.arange(100) >= 50).astype(float),
    }
    correct = np.array([True] * right + [False] * (12 - right))
    stated = np.array([confidence] * 10 + [0.1] * 2)
    return FormRun(
        name, seed, method_settings(**settings), curve, np.array(["+99"] * 10 + ["*9999"] * 2), stated, correct
    )


def test_figures_by_hand():
    row = training("scripts", 0, SCRIPTS, confidence=0.6).row
    assert row["accuracy"] == pytest.approx(8 / 12)
    assert row["stated"] == pytest.approx(6.2 / 12)
    assert row["Brier"] == pytest.approx((8 * 0.16 + 2 * 0.36 + 2 * 0.01) / 12)
    assert row["ECE"] == pytest.approx((10 * abs(0.8 - 0.6) + 2 * 0.1) / 12)
    assert row["AUROC"] == pytest.approx((8 * 2 + 8 * 2 / 2) / (8 * 4))
    assert (row["products right"], row["AUROC, sums"]) == (0, 0.5)
    assert math.isnan(row["AUROC, products"])
    assert row["entropy"] == pytest.approx(np.linspace(1, 0, 100)[-40:].mean())
    assert row["equal from step"] == 51  # the first window of ten steps, all of them equal


def test_means_are_over_the_seeds_that_have_a_figure():
    runs = [training("a", seed, SCRIPTS, confidence=c, right=r) for seed, c, r in ((0, 0.6, 8), (1, 0.9, 0))]
    runs[1].curve["equal"][:] = 0
    seeds, accuracy, stated, *_, auroc, right, _, _, entropy, equal = mean_row({run.seed: run for run in runs})
    assert (seeds, accuracy, right, equal) == ("2", f"{(8 / 12 + 0) / 2:.3f}", "0.000", "1 of 2")
    assert stated == f"{(6.2 + 9.2) / 24:.3f}"
    assert auroc == f"{(8 * 2 + 8 * 2 / 2) / (8 * 4):.3f}"  # the second seed has no right answer
    assert entropy == f"{np.linspace(1, 0, 100)[-40:].mean():.3f}"


@pytest.mark.parametrize(
    ("form", "changed"),
    [(PAPER, []), (SCRIPTS, ["separate_format"]), (NAMED, ["advantage_eps", "entropy_bonus", "separate_format"])],
)
def test_keys_that_differ_from_the_paper(form, changed):
    assert training("a", 0, form, confidence=0.5).changed_keys == changed


@pytest.mark.parametrize(
    ("named", "batch", "chosen"),
    [
        # The form with the lowest score, unless one with fewer changed keys differs from it by chance alone.
        ((0.80, 0.79, 0.80), (0.80, 0.80, 0.79), "named"),
        ((0.50, 0.51, 0.52), (0.80, 0.80, 0.79), "batch"),
        ((0.80, 0.79, 0.80), (0.70, 0.60, 0.65), "named"),
    ],
)
def test_the_rule(named, batch, chosen):
    of_batch = {**NAMED, "advantage_scale": "batch"}
    runs = [training(DEFAULT, seed, SCRIPTS, confidence=c) for seed, c in enumerate((0.2, 0.19, 0.21))]
    runs += [training("named", seed, NAMED, confidence=c) for seed, c in enumerate(named)]
    runs += [training("batch", seed, of_batch, confidence=c) for seed, c in enumerate(batch)]
    assert choose(by_form(runs))[0] == chosen


def test_a_form_with_fewer_right_answers_is_not_chosen():
    runs = [training(DEFAULT, seed, SCRIPTS, confidence=0.3 + seed / 100) for seed in range(3)]
    runs += [training("named", seed, NAMED, confidence=0.1, right=0) for seed in range(3)]
    assert choose(by_form(runs))[0] == DEFAULT


def test_a_form_on_fewer_seeds_takes_no_part():
    runs = [training(DEFAULT, seed, SCRIPTS, confidence=0.7 + seed / 100) for seed in range(3)]
    runs += [training("named", 0, NAMED, confidence=0.8)]
    chosen, rows = choose(by_form(runs))
    assert (chosen, [row[0] for row in rows]) == (DEFAULT, [DEFAULT])


def test_an_archive_keeps_a_training(tmp_path):
    cell = {"name": "scripts", "seed": 3, "made_from": {"settings": {"method": SCRIPTS}}}
    metrics = "step,accuracy,stated,ece,brier,auroc,entropy,equal\n1,.5,.5,,.25,.5,.2,1\n"
    contents = {
        "seed_3/scripts/cell.json": json.dumps(cell).encode(),
        "seed_3/scripts/metrics.csv": metrics.encode(),
        "seed_3/scripts/answers.csv": b"kind,confidence,correct\n+99,0.5,1\n+99,,0\n*9999,0.1,0\n",
    }
    write_archive(tmp_path / "runs.tar.xz", contents)
    (run,) = read_archive(tmp_path / "runs.tar.xz")
    assert (run.name, run.seed, run.method) == ("scripts", 3, method_settings(**SCRIPTS))
    assert run.correct.tolist() == [True, False, False]
    assert np.isnan(run.confidence).tolist() == [False, True, False]
    assert run.curve["equal"].tolist() == [1]
    assert np.isnan(run.curve["ece"][0])
