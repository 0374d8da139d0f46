"""Tables, intervals and verdicts from cells made by hand."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from coca_mindspeed.reproduce.cells import cells_of
from coca_mindspeed.reproduce.claims import Claim, claims, claims_table, sequential_phases
from coca_mindspeed.reproduce.comparisons import comparison_table, comparisons, entries
from coca_mindspeed.reproduce.report import write_report
from coca_mindspeed.reproduce.results import collect, mean_interval, spread
from tests.reproduce.cells_for_tests import PLAN, finish, finished


def test_spread_leaves_undefined_seeds_out_and_says_how_many_are_left():
    found = spread([1.0, math.nan, 3.0])
    assert (found.mean, found.values) == (2.0, (1.0, 3.0))
    assert found.deviation == pytest.approx(math.sqrt(2))
    assert found.show("ece") == "2.00 ± 1.41"
    assert math.isnan(spread([1.0]).deviation)
    assert spread([0.125]).show("ece") == "0.13"  # halves up, as in all tables
    assert spread([math.nan]).show("ece") == "--"


def test_the_interval_is_the_paired_t_test_of_scipy():
    random = np.random.default_rng(0)
    ours, theirs = random.normal(0.1, 0.02, 5), random.normal(0.3, 0.05, 5)
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    found = mean_interval((ours - theirs).tolist())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert math.isnan(mean_interval([1.0]).low)


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [
        ([0.20, 0.21, 0.22], 0.0, "holds"),
        ([-0.20, -0.21, -0.22], 0.0, "does not hold"),
        ([-0.01, 0.0, 0.02], 0.0, "not decided"),
        ([0.5], 0.0, "not decided"),  # one seed decides nothing
        ([math.nan, math.nan], 0.0, "no figures"),
        ([0.95, 0.951, 0.95], 0.92, "holds"),
    ],
)
def test_verdicts(values, bound, verdict):
    assert Claim("c", values, bound).verdict() == verdict


def test_categories_are_plain_means_over_data_sets_with_undefined_ones_left_out(tmp_path):
    results = finished(tmp_path, 1, coca=[{"accuracy": 0.6, "auroc": 0.9}])
    assert results.value("short", "coca", 0, "math", "accuracy") == pytest.approx(0.6)
    assert results.value("short", "coca", 0, "math", "auroc") == 0.9
    assert results.categories("short") == ["math", "factual"]


def test_the_main_table(tmp_path):
    results = finished(tmp_path, coca=[{"ece": 0.01}, {"ece": 0.03}, {"ece": 0.02}])
    main = comparisons(PLAN, "short")[0]
    assert list(main.methods) == ["instruct", "rlvr", "coca"]
    table = comparison_table(main, entries(results, "short", main))
    assert table.header == ("method", "metric", "math", "factual", "paper: math", "paper: factual")
    row = {(r[0], r[1]): r[2:] for r in table.rows}
    assert row["coca", "ECE ↓"][:2] == ("0.02 ± 0.01", "0.02 ± 0.01")
    assert row["instruct", "Acc ↑"][0] == "50.00 ± 0.00"
    assert row["coca", "ECE ↓"][2] != "--"  # the paper's figure stands beside ours
    [ece] = [
        r
        for r in csv.DictReader(table.csv().splitlines())
        if (r["method"], r["metric"], r["category"]) == ("coca", "ece", "math")
    ]
    assert [float(ece[f"value_{i}"]) for i in (1, 2, 3)] == [0.01, 0.03, 0.02]


def test_claims_say_what_the_cells_say(tmp_path):
    results = finished(
        tmp_path,
        coca=[{"ece": 0.02, "accuracy": a, "tokens_to_confidence": 6.0} for a in (0.45, 0.46, 0.44)],
        majority_voting=[{"tokens_to_confidence": 160.0 + seed} for seed in range(3)],
        rlcr=[{"tokens_to_confidence": 10.0 + seed / 10} for seed in range(3)],
    )
    verdicts = {claim.text: claim.verdict() for claim in claims(results, PLAN)}
    assert verdicts["short answers, math: coca has a lower ECE than rlvr (by)"] == "holds"
    by = next(c for c in claims(results, PLAN) if "lower ECE than instruct" in c.text)
    assert by.values == pytest.approx([0.28] * 3)
    assert verdicts["short answers, math: coca keeps accuracy within 2 points of rlvr (difference)"] == "does not hold"
    assert verdicts["short answers: coca's TTC is at least 92% below majority_voting's (share saved)"] == "holds"
    assert verdicts["short answers: coca's TTC is at least 92% below rlcr's (share saved)"] == "does not hold"
    lost = next(c for c in claims(results, PLAN) if "half its accuracy" in c.text)
    assert lost.values == pytest.approx([1 - 0.2 / 0.6] * 3)
    assert "| claim" in claims_table(claims(results, PLAN)).markdown()


def test_sequential_phases_are_means_at_the_ends_of_the_stages(tmp_path):
    results = finished(tmp_path, 1)
    start, accuracy, confidence = sequential_phases(results, "short", 0)
    assert start == accuracy
    assert (accuracy["reward/answer"], confidence["reward/answer"]) == (pytest.approx(0.6), pytest.approx(0.2))
    assert (accuracy["response/length"], confidence["response/length"]) == (10.0, 5.0)


def test_the_report_has_every_table_three_times_and_names_what_is_missing(tmp_path):
    cells = cells_of(PLAN, range(2))
    for cell in cells:
        if (cell.name, cell.seed) != ("coca", 1):
            finish(tmp_path, cell)
    results = collect(tmp_path, cells)
    tables = write_report(results, PLAN, tmp_path / "report", "coca-mindspeed reproduce --seeds 2")
    names = {t.name for t in tables}
    assert names >= {"claims", "short_main", "short_answer_first", "short_segment_against_joint", "short_samples"}
    for name in names:
        for suffix in ("md", "csv", "png"):
            assert (tmp_path / "report" / f"{name}.{suffix}").stat().st_size > 0
    page = (tmp_path / "report" / "README.md").read_text()
    assert "Not finished yet" in page
    assert "short, seed 1, coca" in page
    assert "coca-mindspeed reproduce --seeds 2" in page
    assert all(f"({name}.png)" in page for name in names)


def test_paired_claims_are_over_the_seeds_that_both_have(tmp_path):
    cells = cells_of(PLAN, range(3))
    for cell in cells:
        if (cell.name, cell.seed) != ("instruct", 1):
            finish(tmp_path, cell, ece=0.1 * (cell.seed + 1))
    results = collect(tmp_path, cells)
    assert results.seeds("short", "coca", "instruct") == [0, 2]
    claim = next(c for c in claims(results, PLAN) if "lower ECE than instruct" in c.text)
    assert len(claim.values) == 2
