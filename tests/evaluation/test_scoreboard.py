"""Runs and their numbers: reading, columns, averages, best cells."""

import json
import math
from dataclasses import replace

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, MetricOptions
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_mindspeed.evaluation.scoreboard import Column, Run, Scoreboard, read_runs


def rows(dataset, pairs, **fields):
    return [Prediction(str(i), dataset, "q", "r", s, y, 10, **fields) for i, (s, y) in enumerate(pairs)]


GOOD = [(0.9, True), (0.8, True), (0.2, False), (0.7, True)]
BAD = [(0.9, False), (0.9, True), (0.9, False), (0.9, True)]
ALL_WRONG = [(0.3, False), (0.2, False)]


@pytest.fixture
def board():
    first = Run("coca", [*rows("aime24", GOOD), *rows("gsm8k", GOOD), *rows("aime25", ALL_WRONG), *rows("mine", GOOD)])
    second = Run("rlvr", [*rows("gsm8k", BAD), *rows("aime24", BAD), *rows("aime25", ALL_WRONG)])
    return Scoreboard([first, second, Run("empty", [])])


def test_columns_are_in_the_papers_order_with_averages_behind(board):
    assert [c.name for c in board.columns] == ["gsm8k", "aime24", "aime25", "math", "mine"]
    assert [c.name for c in board.columns if c.is_average] == ["math"]
    assert [run.label for run in board.runs] == ["coca", "rlvr"]


def test_a_data_set_has_the_category_that_its_predictions_state():
    def columns(*runs):
        return {c.name: c.datasets for c in Scoreboard([Run(*run) for run in runs]).columns}

    silent, other = ("silent", [*rows("mine", GOOD), *rows("a", GOOD, category="logic")]), rows("mine", GOOD)
    says = ("says", rows("mine", GOOD, category="logic"))
    for runs in ((silent, says), (says, silent)):  # whichever comes first
        assert columns(*runs)["logic"] == ("a", "mine")
    assert "logic" not in columns(silent, ("says", rows("mine", GOOD, category="art")), says)
    mixed = [*rows("mine", GOOD, category="logic")[:2], *rows("mine", GOOD, category="art")[2:]]
    assert list(columns(("mixed", [*mixed, *rows("a", GOOD, category="logic")]))) == ["a", "mine"]
    assert list(columns(("none", other))) == ["mine"]


def test_average_leaves_undefined_data_sets_out(board):
    [math_] = [column for column in board.columns if column.is_average]
    assert board.interval("coca", math_, "accuracy").estimate == pytest.approx((0.75 + 0.75 + 0) / 3)
    assert board.interval("coca", math_, "auroc").estimate == pytest.approx(1.0)  # of two: undefined on aime25
    assert board.count("coca", math_) == 10
    assert math.isnan(board.interval("rlvr", Column("mine", ("mine",), False), "ece").estimate)  # not answered


def test_best_follows_the_direction_and_is_none_of_equals(board):
    many = 50
    runs = [
        Run(name, [*rows("gsm8k", pairs * many), *rows("aime24", pairs * many), *rows("aime25", GOOD * many)])
        for name, pairs in (("good", GOOD), ("bad", [(1 - s, y) for s, y in GOOD]))
    ]
    large = Scoreboard([*runs, Run("alone", rows("mine", GOOD))])
    found = {(c.name, metric): large.best(c, metric) for c in large.columns for metric in METRIC_SPECS}
    for name in ("gsm8k", "aime24", "math"):
        assert [found[name, metric] for metric in ("auroc", "brier", "ece")] == [{"good"}] * 3
        assert found[name, "accuracy"] == found[name, "uncertainty"] == set()  # equal; without a direction
        assert found[name, "mce"] == set()  # without a paired interval
    assert found["aime25", "brier"] == found["mine", "brier"] == set()  # equal; one run alone is not the best
    # The same difference on four answers, and on no common questions, is not decided.
    assert all(board.best(column, metric) == set() for column in board.columns for metric in METRIC_SPECS)
    other = replace(runs[1], predictions=[replace(p, id=f"x{p.id}") for p in runs[1].predictions])
    apart = Scoreboard([runs[0], other])
    assert apart.best(apart.columns[0], "brier") == set()


def test_the_options_reach_every_figure():
    run = Run("coca", rows("mine", [(0.1, False), (0.15, True)]))
    # With two bins, and with ten that are closed on the left, both answers are in one bin.
    for options, ece in (
        (MetricOptions(), 0.475),
        (MetricOptions(bins=2), 0.375),
        (MetricOptions(closed="left"), 0.375),
    ):
        board = Scoreboard([run], options=options)
        assert board.metrics["coca", "mine"].values["ece"] == pytest.approx(ece)
        assert board.interval("coca", board.columns[0], "ece").estimate == pytest.approx(ece)


def test_runs_are_read_from_files_and_directories(tmp_path):
    demo = tmp_path / "demo"
    write_predictions(demo / "predictions_before.jsonl", rows("arithmetic", BAD))
    write_predictions(demo / "predictions_after.jsonl", rows("arithmetic", GOOD))
    (demo / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/answer": 0.5}) + "\n")
    write_predictions(
        tmp_path / "both.jsonl", [*rows("gsm8k", GOOD, method="coca"), *rows("gsm8k", BAD, method="rlvr", model="qwen")]
    )
    for place in ("b", "c/b"):
        write_predictions(tmp_path / place / "predictions.jsonl", rows("gsm8k", GOOD))
    runs = read_runs([demo, tmp_path / "both.jsonl", tmp_path / "b", tmp_path / "c" / "b"])
    labels = ["demo before", "demo after", "demo", "coca", "qwen rlvr", "b #1", "b #2"]
    assert [run.label for run in runs] == labels
    assert [run.label for run in runs if run.training] == [run.label for run in runs if not run.predictions] == ["demo"]
    assert [run.method for run in runs] == [None, None, None, "coca", "rlvr", None, None]


def test_bad_paths_are_refused(tmp_path):
    with pytest.raises(DataError, match="no: "):
        read_runs([tmp_path / "no"])
    with pytest.raises(DataError, match=str(tmp_path)):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text('{"stp": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: "):
        read_runs([tmp_path])
