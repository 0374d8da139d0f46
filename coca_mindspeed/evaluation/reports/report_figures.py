"""The figures of a report: one picture compares all runs on one data set."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from coca_mindspeed.evaluation.metrics.binning import BinsClosed, bin_table
from coca_mindspeed.evaluation.metrics.curves import risk_coverage, roc
from coca_mindspeed.evaluation.predictions import Outcomes
from coca_mindspeed.evaluation.reports.figures import (
    GREY,
    SKY,
    VERMILION,
    grid_figure,
    line_style,
    new_figure,
    plot_text,
    tidy,
)
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard

Groups = Mapping[str, Outcomes]


def reliability_grid(groups: Groups, closed: BinsClosed = "right") -> Figure:
    """A small reliability diagram for each run, with counts and 95% intervals."""
    figure, panels = grid_figure(len(groups), "stated confidence", "share of right answers", share_y=True)
    for axes, (label, data) in zip(panels, groups.items(), strict=False):
        table = bin_table(data.confidence, data.correct, closed=closed)
        full = table.count > 0
        middle = (table.edges[:-1] + table.edges[1:])[full] / 2
        accuracy, stated = np.nan_to_num(table.accuracy), np.nan_to_num(table.confidence)
        # One outline for all bins is drawn several times faster than a rectangle for each.
        axes.stairs(accuracy, table.edges, fill=True, facecolor=SKY, edgecolor="black", linewidth=0.6)
        low, high = np.minimum(stated, accuracy), np.maximum(stated, accuracy)
        axes.stairs(
            high,
            table.edges,
            baseline=low,
            fill=True,
            facecolor="none",
            edgecolor=VERMILION,
            hatch="/////",
            linewidth=0.8,
        )
        axes.vlines(middle, table.low[full], table.high[full], color="black", linewidth=1.2)
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=0.9)
        for x, count in zip(middle, table.count[full], strict=True):
            axes.text(x, 1.04, f"{count}", fontsize=6, ha="center", rotation=60, va="bottom")
        axes.set(xlim=(0, 1), ylim=(0, 1.3), yticks=np.arange(6) / 5)
        axes.set_title(plot_text(label), fontsize=8)
    return figure


def histogram_grid(groups: Groups, closed: BinsClosed = "right") -> Figure:
    """Histograms of confidence, right answers upwards and wrong ones downwards."""
    figure, panels = grid_figure(len(groups), "stated confidence", "right (up) and wrong (down)")
    for axes, (label, data) in zip(panels, groups.items(), strict=False):
        right = bin_table(data.confidence[data.correct], data.correct[data.correct], closed=closed).count
        wrong = bin_table(data.confidence[~data.correct], data.correct[~data.correct], closed=closed).count
        edges = np.arange(11) / 10
        axes.stairs(right, edges, fill=True, facecolor=SKY, edgecolor="black", linewidth=0.6)
        axes.stairs(-wrong, edges, fill=True, facecolor="white", edgecolor=VERMILION, hatch="/////", linewidth=0.8)
        axes.axhline(0, color="black", linewidth=0.8)
        top = max(1, int(max(right.max(), wrong.max())))
        axes.set(xlim=(0, 1), ylim=(-1.1 * top, 1.1 * top))
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        axes.set_title(plot_text(label), fontsize=8)
    return figure


def threshold_curves(groups: Groups) -> Figure:
    """Risk against coverage, and ROC, a line for each run."""
    figure, [[risk, hits]] = new_figure(1, 2, (10.0, 4.8))
    for index, (label, data) in enumerate(groups.items()):
        style = line_style(index) | {"linewidth": 1.4, "markersize": 4}
        coverage, error = risk_coverage(data.confidence, data.correct)
        if len(coverage):
            risk.plot(coverage, error, **style, markevery=max(1, len(coverage) // 8), label=plot_text(label))
        alarm, hit = roc(data.confidence, data.correct)
        if len(alarm):
            hits.plot(alarm, hit, **style, markevery=max(1, len(alarm) // 8), label=plot_text(label))
    hits.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    for axes, title in ((risk, "Risk and coverage"), (hits, "ROC of confidence")):
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.set_title(title, fontsize=10)
    tidy(risk, xlabel="coverage (share of most confident answers)", ylabel="error rate of those")
    tidy(hits, xlabel="wrong answers above the threshold", ylabel="right answers above the threshold")
    _legend(figure, (risk, hits))
    return figure


def cost_scatter(board: Scoreboard, columns: Sequence[Column]) -> Figure | None:
    """Accuracy against tokens to confidence, a point with intervals for each run; None where no TTC is known."""
    points = [_CostPoint(column, index, run.label, board) for column in columns for index, run in enumerate(board.runs)]
    points = [point for point in points if not math.isnan(point.tokens.estimate)]
    if not points:
        return None
    shown = [column for column in columns if any(point.column == column for point in points)]
    figure, [row] = new_figure(1, len(shown), (max(5.0, 3.6 * len(shown)), 4.4))
    for axes, column in zip(row, shown, strict=True):
        for point in points:
            if point.column == column:
                point.draw(axes)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(plot_text(column.name), fontsize=10)
        tidy(axes, xlabel="tokens to confidence (log)", ylabel="accuracy, percent")
    _legend(figure, row)
    return figure


class _CostPoint:
    """One run's accuracy and tokens to confidence in one column."""

    def __init__(self, column: Column, index: int, label: str, board: Scoreboard) -> None:
        self.column, self.index, self.label = column, index, label
        self.tokens = board.interval(label, column, "tokens_to_confidence")
        self.accuracy = board.interval(label, column, "accuracy")

    def draw(self, axes: Axes) -> None:
        style, accuracy = line_style(self.index), self.accuracy
        spread = np.array([[accuracy.estimate - accuracy.low], [accuracy.high - accuracy.estimate]]) * 100
        axes.errorbar(
            [self.tokens.estimate],
            [accuracy.estimate * 100],
            np.maximum(spread, 0),
            **style | {"linestyle": "none"},
            capsize=3,
            label=plot_text(self.label),
        )


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda pair: len(pair[1]))
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
