"""AUROC within families, by hand, and its bootstrap."""

import numpy as np
import pytest

from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from experiments.reproduce.discrimination import _draws, learning_curves, statistics
from experiments.reproduce.plan import jobs_of
from experiments.reproduce.results import collect
from tests.experiments.reproduce.jobs_for_tests import PLAN


def answers(dataset, *rows):
    """Questions with two answers each: (confidence, correct) pairs."""
    return [
        Prediction(f"{number}", dataset, "q", "r", confidence, correct, 1, sample=sample)
        for number, pair in enumerate(rows)
        for sample, (confidence, correct) in enumerate(pair)
    ]


def test_families_apart_have_no_discrimination_within():
    """Easy family at .9, hard family at .1, each constant within; the third has only right answers."""
    easy = answers("easy", *[((0.9, True), (0.9, True))] * 3, ((0.9, False), (0.9, False)))
    hard = answers("hard", *[((0.1, False), (0.1, False))] * 3, ((0.1, True), (0.1, True)))
    sure = answers("sure", ((0.2, True), (0.9, True)))
    rows = [*easy, *hard]
    found = statistics(rows, _draws(rows, 0))
    assert found["accuracy"][0] == 0.5
    assert found["AUROC"][0] == pytest.approx(0.75)
    assert found["within"][0] == 0.5
    assert found["AUROC, family mean"][0] == pytest.approx(0.75)  # rates of .75 and .25 in place of .9 and .1
    assert np.isnan(found["within, expectation"][0])
    assert statistics([*rows, *sure], _draws([*rows, *sure], 0))["within"][0] == 0.5


def test_the_bootstrap_draws_questions_with_all_their_answers_within_families():
    rows = [*answers("a", *[((0.5, True), (0.4, False))] * 30), *answers("b", *[((0.5, True), (0.5, True))] * 10)]
    draws = _draws(rows, 200)
    assert all(weights[0] == 1 for weights in draws.values())
    for family, size in (("a", 30), ("b", 10)):
        total = sum(weights for (dataset, _), weights in draws.items() if dataset == family)
        assert (total == size).all()
    found = statistics(rows, draws)
    assert np.allclose(found["accuracy"], 0.625)  # every question of a family has the same answers
    assert np.allclose(found["within"], 1.0)


def test_curves_of_stopped_runs_are_shown_with_the_seeds_that_got_so_far(tmp_path):
    right, wrong = ((0.9, True), (0.8, True)), ((0.1, False), (0.2, False))
    guess = ((0.5, True), (0.5, False))
    jobs = jobs_of(PLAN, range(2))
    for job in jobs:
        for step in (50, 25) if (job.name, job.seed) == ("coca", 0) else (25,) if job.name == "coca" else ():
            rows = answers("sums", right, wrong, wrong) if job.seed == 0 else answers("sums", guess, guess, guess)
            write_predictions(job.directory(tmp_path) / "run" / "evaluations" / f"step_{step:06d}.jsonl", rows)
    table, _ = learning_curves(collect(tmp_path, jobs), PLAN, "short")
    column = table.header.index("AUROC")
    assert [row[:3] for row in table.rows] == [("coca", "25", "0, 1"), ("coca", "50", "0")]
    assert [row[column].split()[0] for row in table.rows] == ["0.750", "1.000"]  # means of 1 and .5, and of 1
    assert [row[:3] for row in table.csv_rows] == [("coca", 0, 25), ("coca", 1, 25), ("coca", 0, 50)]
    assert learning_curves(collect(tmp_path / "none", jobs), PLAN, "short") is None
