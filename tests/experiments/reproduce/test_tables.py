"""Statistics, claims and tables from hand-made jobs; AUROC within families and its bootstrap."""

import csv
import json
import math
import re

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from experiments.reproduce.claims import Claim, claims, claims_table
from experiments.reproduce.discrimination import bootstrap_weights, learning_curves, statistics
from experiments.reproduce.plan import jobs_of
from experiments.reproduce.report import write_report
from experiments.reproduce.results import collect, holm, mean_differs, mean_interval, spread
from experiments.reproduce.tables import comparison_table, comparisons, entries
from tests.experiments.reproduce.jobs_for_tests import PLAN, finish, finished


def csv_rows(table):
    return list(csv.DictReader(table.csv().splitlines()))


def main_table(results):
    comparison = comparisons(PLAN, "short")[0]
    return comparison_table(comparison, entries(results, "short", comparison))


@pytest.mark.parametrize(
    ("values", "mean", "deviation", "shown"),
    [
        ([1.0, math.nan, 3.0], 2.0, math.sqrt(2), "2.000 ± 1.414 (n = 2)"),
        ([1.0, 3.0], 2.0, math.sqrt(2), "2.000 ± 1.414"),
        ([0.0745], 0.0745, math.nan, "0.075"),  # half up
        ([math.nan], math.nan, math.nan, "--"),
    ],
)
def test_spread(values, mean, deviation, shown):
    found = spread(values)
    assert (found.mean, found.deviation) == pytest.approx((mean, deviation), nan_ok=True)
    assert found.show("ece") == shown


def test_intervals_and_p_are_those_of_scipy():
    random = np.random.default_rng(0)
    ours, theirs = random.normal(0.1, 0.02, 5), random.normal(0.3, 0.05, 5)
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    found = mean_interval((ours - theirs).tolist())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    for bound in (-0.1, 0.0, 0.2):
        values = random.normal(0.1, 0.1, 5)
        assert mean_differs(values.tolist(), bound) == pytest.approx(ttest_1samp(values, bound).pvalue)
        interval = mean_interval(values.tolist())
        assert (mean_differs(values.tolist(), bound) < 0.05) == (not interval.low <= bound <= interval.high)
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(mean_differs([0.1], 0.0))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [
        ([0.20, 0.21, 0.22], 0.0, "holds"),
        ([-0.20, -0.21, -0.22], 0.0, "does not hold"),
        ([-0.01, 0.0, 0.02], 0.0, "not decided"),
        ([0.5], 0.0, "not decided"),
        ([math.nan, math.nan], 0.0, "no figures"),
        ([0.95, 0.951, 0.95], 0.92, "holds"),
        ([0.1, 0.1], 0.0, "not decided"),
        ([0.0, 0.0, 0.0], -0.02, "not decided"),
    ],
)
def test_verdicts(values, bound, verdict):
    assert Claim("c", values, bound).verdict() == verdict


def test_verdicts_are_corrected_for_the_number_of_claims():
    weak = Claim("weak", [0.1, 0.2, 0.3, 0.25, 0.05])  # p about .02
    assert claims_table([weak]).rows[0][-2:] == ("holds", "holds")
    among = claims_table([weak, *(Claim(f"noise {i}", [-0.1, 0.1, 0.05]) for i in range(4))])
    assert among.rows[0][4] == "5 of 5"
    row = csv_rows(among)[0]
    assert float(row["p_holm"]) == pytest.approx(5 * float(row["p"]))
    assert (row["alone"], row["corrected"], row["seeds_above"]) == ("holds", "not decided", "5.0")


def test_claims(tmp_path):
    metrics = ((0.02, 0.45), (0.03, 0.46), (0.01, 0.44))
    results = finished(
        tmp_path,
        coca=[{"ece": ece, "accuracy": accuracy, "tokens_to_confidence": 6.0} for ece, accuracy in metrics],
        majority_voting=[{"tokens_to_confidence": 160.0 + seed} for seed in range(3)],
        rlcr=[{"tokens_to_confidence": 10.0 + seed / 10} for seed in range(3)],
    )
    found = {claim.text: claim for claim in claims(results, PLAN)}
    for text, verdict in {
        "short answers, math: coca has a lower ECE than rlvr (by)": "holds",
        "short answers, math: coca keeps accuracy within 2 points of rlvr (difference)": "does not hold",
        "short answers: coca's TTC is at least 92% below majority_voting's (share saved)": "holds",
        "short answers: coca's TTC is at least 92% below rlcr's (share saved)": "does not hold",
    }.items():
        assert found[text].verdict() == verdict
    by = found["short answers, math: coca has a lower ECE than instruct (by)"]
    assert by.values == pytest.approx([0.28, 0.27, 0.29])
    lost = next(claim for text, claim in found.items() if "half its accuracy" in text)
    assert lost.values == pytest.approx([1 - 0.2 / 0.6] * 3)


def test_the_main_table(tmp_path):
    results = finished(tmp_path, coca=[{"ece": 0.01, "auroc": 0.9}, {"ece": 0.03, "auroc": None}, {"ece": 0.02}])
    table = main_table(results)
    assert table.header == ("method", "metric", "math", "factual", "paper: math", "paper: factual")
    row = {(r[0], r[1]): r[2:] for r in table.rows}
    assert list(dict.fromkeys(method for method, _ in row)) == ["instruct", "rlvr", "coca"]
    assert row["coca", "ECE ↓"][:3] == ("0.020 ± 0.010", "0.020 ± 0.010", "0.10")
    assert row["coca", "AUROC ↑"][0] == "0.700 ± 0.283 (n = 2)"
    assert row["instruct", "accuracy ↑"][0] == "50.0% ± 0.0"
    by_key = {(r["method"], r["metric"], r["category"]): r for r in csv_rows(table)}
    assert [by_key["coca", "ece", "math"][f"seed_{i}"] for i in range(3)] == ["0.01", "0.03", "0.02"]
    auroc = by_key["coca", "auroc", "math"]
    assert [auroc[key] for key in ("n", "seed_0", "seed_1", "seed_2")] == ["2", "0.9", "", "0.5"]


def test_the_report(tmp_path):
    jobs = jobs_of(PLAN, range(2))
    for job in jobs:
        if (job.name, job.seed) != ("coca", 1):
            finish(tmp_path, job)
    for job, changed in ((jobs[0], {"machines": ["B, 4 cores"]}), (jobs[1], {"sources": ["abc", "def+"]})):
        path = job.directory(tmp_path) / "cell.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    names = {t.name for t in write_report(collect(tmp_path, jobs), PLAN, tmp_path / "report", "the command")}
    assert names >= {"claims", "short_main", "short_answer_first", "short_segment_against_joint", "short_samples"}
    files = {path.name for path in (tmp_path / "report").iterdir()}
    text = (tmp_path / "report" / "README.md").read_text()
    assert {f"{name}.csv" for name in names} <= files
    assert {f"{name}.csv" for name in names} == set(re.findall(r"\]\(([a-z_]+\.csv)\)", text))
    assert {name for name in files if name.endswith("png")} == set(re.findall(r"\]\(([a-z_]+\.png)\)", text))
    for part in ("short, seed 1, coca", "the command", "B, 4 cores", "`abc`, `def+`"):
        assert part in text


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
    found = statistics(rows, bootstrap_weights(rows, 0))
    assert found["accuracy"][0] == 0.5
    assert found["AUROC"][0] == pytest.approx(0.75)
    assert found["within"][0] == 0.5
    assert found["AUROC, family mean"][0] == pytest.approx(0.75)  # rates of .75 and .25 in place of .9 and .1
    assert np.isnan(found["within, expectation"][0])
    assert statistics([*rows, *sure], bootstrap_weights([*rows, *sure], 0))["within"][0] == 0.5


def test_the_bootstrap_draws_whole_questions_within_families():
    rows = [*answers("a", *[((0.5, True), (0.4, False))] * 30), *answers("b", *[((0.5, True), (0.5, True))] * 10)]
    draws = bootstrap_weights(rows, 200)
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
