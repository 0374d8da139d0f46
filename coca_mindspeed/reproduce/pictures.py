"""A comparison as a picture: a panel for each metric and category, a dot for each seed."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from coca_mindspeed.evaluation.metrics.specs import metric_spec
from coca_mindspeed.evaluation.reports.plots import BLUE, GREY, VERMILION, new_figure, plot_text, tidy
from coca_mindspeed.reproduce.comparisons import Entry
from coca_mindspeed.reproduce.results import spread


def dot_chart(numbers: Sequence[Entry]) -> Figure:
    """Our seeds as dots, their mean as a bar, the paper's figure as a diamond, a calibrated model's ECE dotted."""
    metrics = list(dict.fromkeys(e.metric for e in numbers))
    categories = list(dict.fromkeys(e.category for e in numbers))
    methods = list(dict.fromkeys(e.method for e in numbers))
    figure, grid = new_figure(len(metrics), len(categories), (3.4 * len(categories) + 1.2, 1.9 * len(metrics) + 0.8))
    for row, metric in zip(grid, metrics, strict=True):
        info = metric_spec(metric)
        for axes, category in zip(row, categories, strict=True):
            for e in (e for e in numbers if (e.metric, e.category) == (metric, category)):
                x = methods.index(e.method)
                axes.plot([x] * len(e.ours.values), [v * info.scale for v in e.ours.values], "o", color=BLUE, alpha=0.6)
                if not math.isnan(e.ours.mean):
                    axes.hlines(e.ours.mean * info.scale, x - 0.25, x + 0.25, color=BLUE, linewidth=2)
                if e.calibrated and not math.isnan(chance := spread(list(e.calibrated.values())).mean):
                    axes.hlines(chance * info.scale, x - 0.25, x + 0.25, color=GREY, linewidth=2, linestyle=":")
                if not math.isnan(e.paper):
                    axes.plot(x, e.paper * info.scale, "D", color=VERMILION, fillstyle="none", markersize=6)
            tidy(axes, xlabel="", ylabel=info.label if category == categories[0] else "")
            axes.set_xticks(range(len(methods)), list(map(plot_text, methods)), rotation=30, ha="right", fontsize=7)
            axes.set_xlim(-0.6, len(methods) - 0.4)
            if row is grid[0]:
                axes.set_title(plot_text(category), fontsize=10)
    shown = ["dots: seeds, bar: mean"]
    if any(not math.isnan(e.paper) for e in numbers):
        shown.append("diamond: the paper's model")
    if "ece" in metrics:
        shown.append("dotted: ECE if calibrated")
    figure.suptitle("; ".join(shown), fontsize=8)
    return figure
