"""Pictures of calibration and of training, as matplotlib figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coca_mindspeed.evaluation.metrics.binning import BinsClosed, bin_table
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.catalogue import metric_info, show
from coca_mindspeed.evaluation.predictions import Outcomes, Prediction, outcomes
from coca_mindspeed.evaluation.reports.figures import (
    GREY,
    SKY,
    VERMILION,
    line_style,
    new_figure,
    pixels,
    plot_text,
    tidy,
)

# Predictions, or their arrays (confidence, correct).
PlotData = Sequence[Prediction] | Outcomes | tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]
MetricRows = Sequence[Mapping[str, Any]]

# Title, and the metrics.jsonl keys to draw: the first that a run has.
TRAINING_PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Confidence reward", "mean reward", ("reward/confidence",)),
    ("Answer reward", "mean reward", ("reward/answer",)),
    ("Expected calibration error", "ECE", ("rollout/ece", "eval/ece")),
    ("Response length", "tokens", ("response/length",)),
)


def arrays(data: PlotData) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Confidence (n,), NaN where invalid, and correct (n,)."""
    if isinstance(data, tuple):
        return data
    if not isinstance(data, Outcomes):
        data = outcomes(data)
    return data.confidence, data.correct


def _draw_reliability(axes: Axes, counts: Axes, label: str, data: PlotData, bins: int, closed: BinsClosed) -> None:
    confidence, correct = arrays(data)
    table = bin_table(confidence, correct, bins=bins, closed=closed)
    full = table.count > 0
    middle = (table.edges[:-1] + table.edges[1:])[full] / 2
    width = np.diff(table.edges)[full]
    accuracy, stated = table.accuracy[full], table.confidence[full]
    axes.bar(middle, accuracy, width, color=SKY, edgecolor="black", linewidth=0.8, label="share of right answers")
    axes.bar(
        middle,
        np.abs(stated - accuracy),
        width,
        bottom=np.minimum(stated, accuracy),
        facecolor="none",
        edgecolor=VERMILION,
        hatch="////",
        linewidth=1.2,
        label="gap to stated confidence",
    )
    errors = np.maximum([accuracy - table.low[full], table.high[full] - accuracy], 0)
    axes.errorbar(middle, accuracy, errors, fmt="none", ecolor="black", capsize=3, linewidth=1.2, label="95% interval")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.2, label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    metrics = calibration_metrics(confidence, correct, bins=bins, closed=closed)
    shown = "   ".join(f"{metric_info(m).label} {show(m, metrics.values()[m])}" for m in ("ece", "auroc", "accuracy"))
    axes.set_title(f"{plot_text(label)}\n{shown}", fontsize=10)
    if not full.any():
        axes.text(0.5, 0.5, "no valid confidence", ha="center", va="center")
    tidy(axes, xlabel="", ylabel="share of right answers")
    counts.bar(middle, table.count[full], width, color="#BBBBBB", edgecolor="black", linewidth=0.8)
    for x, count in zip(middle, table.count[full], strict=True):
        counts.annotate(f"{count}", (x, count), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    counts.set_xlim(0, 1)
    counts.margins(y=0.25)
    tidy(counts, xlabel=f"stated confidence ({metrics.n_valid} of {metrics.n} valid)", ylabel="answers")


def reliability_diagram(groups: Mapping[str, PlotData], *, bins: int = 10, closed: BinsClosed = "right") -> Figure:
    """Reliability diagrams side by side, the number of answers in each bin below.

    Args:
        groups: title -> predictions or arrays, such as ``{"before": ..., "after": ...}``.
        bins: equal-width bins.
        closed: the side on which a bin holds its edge.
    """
    if not groups:
        raise ValueError("reliability_diagram needs at least one group")
    figure, axes = new_figure(2, len(groups), (4.4 * len(groups), 5.6), height_ratios=[3, 1])
    for column, (label, data) in enumerate(groups.items()):
        _draw_reliability(axes[0][column], axes[1][column], label, data, bins, closed)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(groups) == 1 else 4, fontsize=8)
    return figure


def reliability_image(
    confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_], *, title: str
) -> npt.NDArray[np.uint8]:
    """A reliability diagram for TensorBoard's ``add_image(..., dataformats="HWC")``.

    Args:
        confidence: (n,), NaN where invalid.
        correct: (n,).
        title: above the metrics, such as ``step 120``.

    Returns:
        uint8 (height, width, 3).
    """
    return pixels(reliability_diagram({title: (confidence, correct)}))


def _runs(rows: MetricRows | Mapping[str, MetricRows]) -> Mapping[str, MetricRows]:
    return rows if isinstance(rows, Mapping) else {"": rows}


def _curve(rows: MetricRows, keys: Sequence[str]) -> tuple[list[float], list[float]]:
    """Steps and values of the first of ``keys`` that the rows have."""
    for key in keys:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            return [float(step) for step, _ in points], [float(value) for _, value in points]
    return [], []


def moving_average(values: Sequence[float], window: int) -> npt.NDArray[np.float64]:
    """Mean of each value and up to ``window - 1`` before it, NaN left out; shape as ``values``."""
    array = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(array)
    sums = np.cumsum(np.concatenate([[0.0], np.where(known, array, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], known]))
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(ends - window, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[ends] - sums[starts]) / (counts[ends] - counts[starts]))


def training_curves(rows: MetricRows | Mapping[str, MetricRows], *, smooth: int | None = None) -> Figure:
    """Confidence reward, answer reward, ECE and response length over the training steps.

    Args:
        rows: the objects of a run's metrics.jsonl, or label -> objects for several runs.
        smooth: window in steps of the moving average that is drawn over the faint raw curve; a twentieth of the
            run by default.
    """
    runs = _runs(rows)
    figure, grid = new_figure(2, 2, (9.0, 6.0))
    panels = [axes for row in grid for axes in row]
    for axes, (title, unit, keys) in zip(panels, TRAINING_PANELS, strict=True):
        for index, (label, run) in enumerate(runs.items()):
            steps, values = _curve(run, keys)
            if not steps:
                continue
            window = max(1, len(steps) // 20) if smooth is None else smooth
            style = line_style(index)
            if window > 1:
                axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.8)
            axes.plot(
                steps,
                moving_average(values, window),
                **style,
                markevery=max(1, len(steps) // 8),
                markersize=5,
                linewidth=1.6,
                label=plot_text(label),
            )
        if not axes.lines:
            axes.text(0.5, 0.5, f"no {keys[0]} in the metrics", transform=axes.transAxes, ha="center", va="center")
        axes.set_title(title, fontsize=10)
        tidy(axes, xlabel="training step", ylabel=unit)
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda pair: len(pair[1]))
    if any(labels):
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
    return figure
