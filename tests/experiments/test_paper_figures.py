"""The paper's figures, and the fifteen cells in which its tables disagree."""

import math
from decimal import ROUND_HALF_UP, Decimal

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import round_half_up, show
from coca_mindspeed.evaluation.scoreboard import DATASETS
from experiments.paper.figures import paper, printed, published

# (setting, method, metric, category): printed, rebuilt
KNOWN = {
    ("qwen2.5-3b/math", "rlvr", "accuracy", "math"): ("42.86", "42.94"),
    ("qwen2.5-7b/math", "rlvr+question_prob", "ece", "factual"): ("0.30", "0.31"),
    ("qwen2.5-7b/math", "rlvr+assessor", "ece", "math"): ("0.24", "0.25"),
    ("qwen2.5-7b/math", "rlvr+assessor", "ece", "factual"): ("0.26", "0.27"),
    ("answer_first/qwen2.5-7b", "majority_voting", "tokens_to_confidence", "math"): ("9549.16", "9549.15"),
    ("answer_first/qwen2.5-7b", "rlcr", "tokens_to_confidence", "factual"): ("121.78", "121.77"),
} | {
    ("llama3-8b/math", f"rlvr+{name}", "accuracy", category): figures
    for name in ("question_prob", "assessor", "probe")
    for category, figures in (
        ("math", ("28.15", "26.73")),
        ("code", ("61.48", "44.55")),
        ("factual", ("35.70", "32.24")),
    )
}


def category_mean(values):
    """The mean over a category's data sets without undefined ones, rounded half up to hundredths."""
    known = [value for value in values if value is not None]
    return (sum(known, Decimal(0)) / len(known)).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def test_category_tables_are_rebuilt_in_every_cell_but_fifteen():
    tables = paper()
    cells = {
        (setting, method, metric, category): (
            figure,
            category_mean([tables.per_dataset[setting][method][metric][name] for name in DATASETS[category]]),
        )
        for setting, methods in tables.per_category.items()
        for method, metrics in methods.items()
        for metric, figures in metrics.items()
        for category, figure in figures.items()
        if figure is not None
    }
    assert len(cells) == 411
    assert {key: (f"{a:.2f}", f"{b:.2f}") for key, (a, b) in cells.items() if a != b} == KNOWN


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.125, "0.13"), (2.675, "2.68"), (0.12499999999999999, "0.13"), (-0.125, "-0.13"), (0.1249, "0.12")],
)
def test_round_half_up(value, expected):
    assert str(round_half_up(value, 2)) == expected


def test_show():
    assert show("accuracy", 0.42945) == "42.9%"
    assert show("ece", math.nan) == show("auroc", None) == printed("ece", math.nan) == "--"
    assert show("ece", 0.05, signed=True) == "+0.050"
    assert show("ece", 0.0745) == "0.075"
    assert show("accuracy_at_0.5", 0.9) == "90.0%"
    assert printed("accuracy", 0.42945) == "42.95%"  # the paper's own two decimals


def test_published_figures_in_our_units():
    assert published("qwen2.5-3b/math", "coca", "ece", "math") == 0.09  # the paper's headline
    assert published("qwen2.5-3b/math", "instruct", "ece", "math") == 0.54
    assert published("qwen2.5-7b/math", "instruct", "accuracy", "gsm8k") == pytest.approx(0.8946)
    assert math.isnan(published("qwen2.5-7b/math", "instruct", "auroc", "aime25"))
    assert math.isnan(published("qwen2.5-7b/math", "instruct", "ece", "arithmetic"))


def test_unknown_names_are_refused_with_the_known_ones():
    for setting, method in (("qwen3", "coca"), ("qwen2.5-7b/math", "rlcr")):
        with pytest.raises(ConfigError, match=f"'{setting if method == 'coca' else method}'"):
            published(setting, method, "ece", "math")
