"""Figures: drawn without pyplot, the same bytes every time, labelled, and true to the numbers."""

from itertools import pairwise

import numpy as np
import pytest

from coca_mindspeed.evaluation.metrics import calibration_metrics, risk_coverage
from coca_mindspeed.evaluation.plots import gap_curves, png_bytes, reliability_diagram, training_curves
from coca_mindspeed.evaluation.predictions import GradedPredictions

STATED = np.array([0.05, 0.95, 0.95, 0.95, 0.3, np.nan])
RIGHT = np.array([False, True, True, False, False, True])


def group(stated=STATED, right=RIGHT):
    return GradedPredictions(stated, right, np.full(len(stated), np.nan))


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in (*axes.texts, axes.title)]


def test_reliability_diagram_shows_accuracy_counts_and_metrics():
    figure = reliability_diagram({"before": group(), "after": group(STATED, ~RIGHT)})
    bars, gaps = figure.axes[0].patches
    assert bars.get_data().values == pytest.approx([0, 0, 0, 0, 0, 0, 0, 0, 0, 2 / 3])
    assert gaps.get_data().values == pytest.approx([0.05, 0, 0.3, 0, 0, 0, 0, 0, 0, 0.95])  # 0.3 lies in (0.2, 0.3]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "1", "3"]
    [legend] = figure.legends
    named = ["fraction correct", "gap to stated confidence", "95% interval", "perfect calibration", "number of answers"]
    assert [text.get_text() for text in legend.get_texts()] == named
    title = figure.axes[0].get_title()
    assert title.startswith("before\n")
    assert f"ECE {calibration_metrics(STATED, RIGHT).values['ece']:.3f}" in title
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == ["before", "after"]


@pytest.mark.parametrize("panels", [1, 2, 4, 5])
def test_legend_and_titles_are_inside_the_frame(panels):
    figure = reliability_diagram({f"a run {i} of a long name": group() for i in range(panels)})
    figure.canvas.draw()
    [legend] = figure.legends
    titles = [axes.title.get_window_extent() for axes in figure.axes]
    for box in (legend.get_window_extent(), *titles):
        assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= figure.bbox.width, box.y1 <= figure.bbox.height) == (True,) * 4
    assert all(left.x1 <= right.x0 for left, right in pairwise(titles[:4]))


def test_the_same_picture_is_the_same_bytes():
    first, second = (png_bytes(reliability_diagram({"x": group()})) for _ in range(2))
    assert first == second
    assert "no valid confidence" in texts(reliability_diagram({"x": group(np.array([np.nan]), np.array([True]))}))


def test_training_curves_of_one_and_of_several_runs():
    fixed = {"eval/ece": 0.3, "response/length": 12.0}
    rows = [
        {"step": i, "reward/confidence": -1 / (i + 1), "reward/answer": None if i == 3 else 0.5, **fixed}
        for i in range(1, 50)
    ]
    titles = ["Confidence reward", "Answer reward", "Expected calibration error", "Response length"]
    alone = training_curves({"": rows})
    assert [axes.get_title() for axes in alone.axes] == titles
    assert [len(legend.get_texts()) for legend in alone.legends] == [2]  # each step, and the moving average
    assert training_curves({"": rows[:30]}).legends == []  # no average, so that a panel's title says all
    markers = [[line.get_marker() for line in training_curves({"": few}).axes[0].lines] for few in (rows[:2], rows[:1])]
    assert markers == [[""], ["o"]]  # a single step would not be seen without one
    several = training_curves({"coca": rows, "rlvr": [{"step": 1, "reward/answer": 0.4}]})
    assert [len(axes.lines) for axes in several.axes] == [2, 3, 2, 2]  # a raw curve and a moving average
    assert len(several.axes[1].lines[0].get_xdata()) == 48
    [legend] = several.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["coca", "rlvr"]
    assert len(legend.get_texts()) == 4
    window = several.axes[0].lines[1].get_ydata()  # over two steps
    assert window[1] == pytest.approx((-1 / 2 - 1 / 3) / 2)


def test_gap_curves_show_each_kind_of_question_that_the_metrics_have():
    seen = {"repeated/accuracy": None, "repeated/confidence": None}
    rows = [{"step": i, "first_sight/accuracy": 0.4, "first_sight/confidence": 0.5, **seen} for i in range(1, 5)]
    rows[3] |= {"held_out/accuracy": 0.3, "held_out/confidence": 0.6}
    figure = gap_curves(rows)
    last = figure.axes[2].lines[:2]
    assert [line.get_ydata()[-1] for line in last] == pytest.approx([0.1, 0.3])
    assert [list(line.get_xdata()) for line in last] == [[1, 2, 3, 4], [4]]
    [legend] = figure.legends
    assert len(legend.get_texts()) == 3  # and the line at 0
    long = [{"step": i, "first_sight/accuracy": 0.4, "first_sight/confidence": 0.5} for i in range(1, 50)]
    assert "moving average" in gap_curves(long).legends[0].get_texts()[0].get_text()


def test_risk_coverage_by_hand():
    coverage, risk = risk_coverage(STATED, RIGHT)
    assert coverage == pytest.approx([3 / 5, 4 / 5, 1])
    assert risk == pytest.approx([1 / 3, 2 / 4, 3 / 5])
    assert len(risk_coverage(np.array([np.nan]), np.array([True]))[0]) == 0
