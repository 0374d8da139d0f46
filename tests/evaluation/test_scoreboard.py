"""Runs and their numbers: reading, columns, averages, best cells, paired differences."""

import json
import math

import numpy as np
import pytest

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions
from coca_mindspeed.evaluation.paper.comparison import compare_with_paper
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.evaluation.runs import Run, read_runs


def rows(dataset, pairs, **fields):
    return [Prediction(str(i), dataset, "q", "r", s, y, 10, **fields) for i, (s, y) in enumerate(pairs)]


GOOD = [(0.9, True), (0.8, True), (0.2, False), (0.7, True)]
BAD = [(0.9, False), (0.9, True), (0.9, False), (0.9, True)]
ALL_WRONG = [(0.3, False), (0.2, False)]


@pytest.fixture
def board():
    first = Run("coca", [*rows("aime24", GOOD), *rows("gsm8k", GOOD), *rows("aime25", ALL_WRONG), *rows("mine", GOOD)])
    second = Run("rlvr", [*rows("gsm8k", BAD), *rows("aime24", BAD), *rows("aime25", ALL_WRONG)])
    return Scoreboard([first, second, Run("empty", [])], replicates=50)


def test_columns_are_in_the_papers_order_with_averages_behind(board):
    assert [(c.name, c.is_average) for c in board.columns] == [
        ("gsm8k", False),
        ("aime24", False),
        ("aime25", False),
        ("math", True),
        ("mine", False),
    ]
    assert [run.label for run in board.runs] == ["coca", "rlvr"]


def test_a_data_set_has_the_category_that_its_predictions_state_and_of_several_none():
    def columns(*runs):
        return {c.name: c.datasets for c in Scoreboard([Run(*run) for run in runs], replicates=5).columns}

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


def test_a_run_without_a_data_set_has_no_cell(board):
    assert math.isnan(board.interval("rlvr", Column("mine", ("mine",), False), "ece").estimate)


def test_best_follows_the_direction_and_ties(board):
    gsm8k, aime25 = board.columns[0], board.columns[2]
    assert board.best(gsm8k, "accuracy") == {"coca"}
    assert board.best(gsm8k, "ece") == {"coca"}
    assert board.best(aime25, "ece") == {"coca", "rlvr"}
    assert board.best(gsm8k, "uncertainty") == set()
    assert board.best(board.columns[-1], "accuracy") == set()  # one run alone is not the best


def test_data_sets_do_not_share_their_draws(board):
    cells = [board._cells["coca", name] for name in ("gsm8k", "aime24")]
    assert not np.array_equal(*(cell.replicates["accuracy"] for cell in cells))
    assert not np.array_equal(*(cell.calibrated.draws for cell in cells))


def test_the_options_reach_every_figure():
    run = Run("coca", rows("mine", [(1.0, False), (0.9, True)]))
    for epsilon, loss in ((1e-6, 13.8), (0.05, 3.0)):
        board = Scoreboard([run], replicates=5, options=MetricOptions(log_epsilon=epsilon))
        expected = (loss - math.log(0.9)) / 2
        assert board.metrics["coca", "mine"].log_score == pytest.approx(expected, abs=0.05)
        assert board.interval("coca", board.columns[0], "log_score").estimate == pytest.approx(expected, abs=0.05)


def test_what_a_calibrated_model_would_show_is_averaged_like_ece(board):
    [math_] = [column for column in board.columns if column.is_average]
    parts = [board.calibrated("coca", c).mean for c in board.columns if c.name in math_.datasets]
    assert board.calibrated("coca", math_).mean == pytest.approx(sum(parts) / 3)
    assert board.calibrated("rlvr", Column("mine", ("mine",), False)) is None


def test_difference_is_paired_by_question(board):
    coca, rlvr = board.runs
    found = board.difference(rlvr, coca, "gsm8k")
    assert found.intervals["accuracy"].estimate == pytest.approx(0.25)
    assert (found.n, found.first, found.second) == (4, 4, 4)
    none = board.difference(rlvr, coca, "mine")
    assert (none.n, none.first, none.second, none.intervals) == (0, 0, 4, {})


def test_comparison_with_the_paper():
    run = Run("ours", rows("gsm8k", [(0.9, True)] * 9 + [(0.9, False)], method="coca"), method="coca")
    comparison = compare_with_paper(Scoreboard([run], replicates=50), "qwen2.5-7b/math")
    by_metric = {row[2]: row for row in comparison.rows}
    assert by_metric["accuracy"][3] == "90.0%"
    ours, theirs, difference = (float(by_metric["accuracy"][i].rstrip("%")) for i in (3, 4, 5))
    assert difference == pytest.approx(ours - theirs, abs=0.05 + 1e-9)  # the paper's has two decimals, ours one
    assert by_metric["accuracy"][4].rstrip("%")[-3] == "."
    assert " to " in by_metric["ECE"][6]
    assert "(95% < 0." in by_metric["ECE"][7]
    assert by_metric["Brier"][7] == ""
    assert "TTC" not in by_metric  # the paper prints none in this setting


def _of_paper(*datasets, **fields):
    return [row for name in datasets for row in rows(name, GOOD, method="coca", **fields)]


def _compared(*runs):
    found = compare_with_paper(Scoreboard(runs, replicates=5), "qwen2.5-7b/math")
    return {(row[0], row[1]) for row in found.rows}, found.left_out


def test_an_average_is_compared_only_with_that_of_the_same_data_sets():
    code, factual = ("mbpp_sanitized", "humaneval"), ("simpleqa", "triviaqa")
    whole = ("gsm8k", "math500", "aime24", "aime25")
    shown, left_out = _compared(Run("ours", _of_paper(*whole, *code, *factual), method="coca"))
    assert {("ours", "math"), ("ours", "code"), ("ours", "factual")} < shown
    assert left_out == []
    assert left_out == _compared(Run("ours", _of_paper("gsm8k"), method="coca"))[1]  # a lone one has no average

    shown, [said] = _compared(Run("ours", _of_paper("gsm8k", "math500", *code), method="coca"))
    assert ("ours", "gsm8k") in shown
    assert ("ours", "code") in shown
    assert ("ours", "math") not in shown
    assert said == "math: not the paper's average, without aime24, aime25"

    mine = rows("my_algebra", GOOD, method="coca", category="math")
    shown, [said] = _compared(Run("ours", [*_of_paper(*whole), *mine], method="coca"))
    assert ("ours", "math") not in shown
    assert said == "math: not the paper's average, with my_algebra"

    # A set that stands under another category is missing in one average and foreign in the other.
    moved = [*_of_paper("math500", "aime24", "aime25", *code), *_of_paper("gsm8k", category="code")]
    _, left_out = _compared(Run("ours", moved, method="coca"))
    assert left_out == [
        "math: not the paper's average, without gsm8k",
        "code: not the paper's average, with gsm8k",
    ]


def test_a_run_that_lacks_a_data_set_of_an_average_is_named():
    whole = ("mbpp_sanitized", "humaneval")
    runs = [Run("all", _of_paper(*whole), method="coca"), Run("half", _of_paper(whole[0]), method="coca")]
    shown, left_out = _compared(*runs)
    assert ("all", "code") in shown
    assert ("half", "code") not in shown
    assert left_out == ["code, half: not the paper's average, without humaneval"]


def test_a_data_set_called_like_a_category_is_not_the_papers_average():
    shown, left_out = _compared(Run("ours", [*_of_paper("gsm8k"), *rows("math", GOOD, method="coca")], method="coca"))
    assert shown == {("ours", "gsm8k")}
    assert left_out == []


def test_nothing_but_a_foreign_average_is_nothing_to_compare():
    own = [*rows("a", GOOD, method="coca", category="math"), *rows("b", GOOD, method="coca", category="math")]
    with pytest.raises(ConfigError, match=r"nothing to compare: the runs' data sets are a, b"):
        _compared(Run("ours", own, method="coca"))


def test_comparison_needs_a_method_and_data_of_the_paper():
    mine = Run("ours", rows("mine", GOOD), method="coca")
    with pytest.raises(ConfigError, match="nothing to compare: the runs' data sets are mine"):
        compare_with_paper(Scoreboard([mine], replicates=5), "qwen2.5-7b/math")
    other = Run("ours", rows("gsm8k", GOOD), method="ppo")
    with pytest.raises(ConfigError, match="run 'ours': method 'ppo' is not in the paper's table"):
        compare_with_paper(Scoreboard([other], replicates=5), "qwen2.5-7b/math")


def test_runs_are_read_from_files_and_directories(tmp_path):
    demo = tmp_path / "demo"
    write_predictions(demo / "predictions_before.jsonl", rows("arithmetic", BAD))
    write_predictions(demo / "predictions_after.jsonl", rows("arithmetic", GOOD))
    (demo / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/answer": 0.5}) + "\n")
    write_predictions(
        tmp_path / "both.jsonl", [*rows("gsm8k", GOOD, method="coca"), *rows("gsm8k", BAD, method="rlvr", model="qwen")]
    )
    runs = read_runs([demo, tmp_path / "both.jsonl"])
    assert [run.label for run in runs] == ["demo before", "demo after", "demo", "coca", "qwen rlvr"]
    assert [bool(run.training) for run in runs] == [False, False, True, False, False]
    assert [run.method for run in runs] == [None, None, None, "coca", "rlvr"]


def test_training_only_and_repeated_labels(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1}\n')
    write_predictions(tmp_path / "b" / "predictions.jsonl", rows("gsm8k", GOOD))
    write_predictions(tmp_path / "c" / "b" / "predictions.jsonl", rows("gsm8k", GOOD))
    runs = read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "c" / "b"])
    assert [run.label for run in runs] == ["a", "b #1", "b #2"]
    assert runs[0].predictions == ()


def test_bad_paths_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_runs([tmp_path / "no"])
    with pytest.raises(DataError, match="holds neither predictions"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text('{"stp": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: "):
        read_runs([tmp_path])
