"""Runs beside the paper's figures."""

import re

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import write_predictions
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard
from experiments.__main__ import main
from experiments.paper.__main__ import compare
from tests.evaluation.test_scoreboard import GOOD, rows


def of_paper(*datasets, **fields):
    return [row for name in datasets for row in rows(name, GOOD, method="coca", **fields)]


WHOLE, CODE = ("gsm8k", "math500", "aime24", "aime25"), ("mbpp_sanitized", "humaneval")


@pytest.mark.parametrize(
    ("predictions", "compared", "not_compared"),
    [
        (of_paper(*WHOLE, *CODE, "simpleqa", "triviaqa"), {"math", "code", "factual"}, set()),
        (of_paper("gsm8k"), {"gsm8k"}, {"math"}),
        (of_paper("gsm8k", "math500", *CODE), {"gsm8k", "code"}, {"math"}),
        (of_paper(*WHOLE) + rows("mine", GOOD, method="coca", category="math"), {"gsm8k"}, {"math"}),
        # A set under another category is missing in one average and foreign in the other.
        (of_paper(*WHOLE[1:], *CODE) + of_paper("gsm8k", category="code"), {"math500"}, {"math", "code"}),
        # A data set called like a category is not the paper's average.
        (of_paper("gsm8k") + rows("math", GOOD, method="coca"), {"gsm8k"}, {"math"}),
    ],
)
def test_an_average_is_compared_only_with_that_of_the_same_data_sets(predictions, compared, not_compared):
    board = Scoreboard([Run("ours", predictions, method="coca")])
    names = {row[1] for row in compare(board, "qwen2.5-7b/math")}
    assert compared <= names
    assert not names & not_compared


@pytest.mark.parametrize(
    ("predictions", "method", "named"),
    [
        (rows("mine", GOOD), "coca", "mine"),
        (rows("a", GOOD, category="math") + rows("b", GOOD, category="math"), "coca", "a, b"),
        (rows("gsm8k", GOOD), "ppo", "'ppo'"),
    ],
)
def test_comparison_needs_a_method_and_data_of_the_paper(predictions, method, named):
    with pytest.raises(ConfigError, match=named):
        compare(Scoreboard([Run("ours", predictions, method=method)]), "qwen2.5-7b/math")


def test_answers_from_before_a_training_are_compared_with_instruct():
    runs = [Run("mine before", rows("gsm8k", GOOD)), Run("mine after", rows("gsm8k", GOOD), method="coca")]
    found = compare(Scoreboard(runs), "qwen2.5-7b/math")
    assert {row[0]: row[4] for row in found if row[2] == "accuracy"} == {
        "mine before": "89.46%",
        "mine after": "92.95%",
    }


def test_the_comparison_is_printed(tmp_path, capsys):
    write_predictions(tmp_path / "coca.jsonl", of_paper("gsm8k", "aime24"))
    assert main(["paper", str(tmp_path / "coca.jsonl"), "--setting", "qwen2.5-3b/math"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| gsm8k +\| ECE ", printed)
    assert not re.search(r"\| math ", printed)
    assert main(["paper", str(tmp_path / "coca.jsonl"), "--setting", "qwen3"]) == 2
