"""What every figure shares: colours, line styles, and saving to the same bytes every time.

Figures are made with matplotlib's objects (``Figure`` and the Agg canvas) and never with pyplot, whose global state
is not safe in a trainer's threads.  Colours are Okabe and Ito's, told apart by colour-blind readers; line styles,
markers and hatches say the same again in black and white.
"""

import io
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import LogLocator, NullLocator

from coca_mindspeed.evaluation.metrics.binning import BinsClosed, bin_table
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.curves import risk_coverage, roc
from coca_mindspeed.evaluation.metrics.specs import metric_info, show
from coca_mindspeed.evaluation.predictions import Outcomes, Prediction, outcomes
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.utils.console import one_line
from coca_mindspeed.utils.files import write_atomically

DPI = 120
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#555555"
SKY = "#8CC5EC"  # light enough for black hatches and error bars on top
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8F7A00")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def new_figure(
    rows: int, columns: int, size: tuple[float, float], height_ratios: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with an Agg canvas and its axes by row and column; size in inches."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, height_ratios=height_ratios).tolist()


def grid_figure(panels: int, xlabel: str, ylabel: str, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A grid of small panels that share their axis labels, laid out by hand: the layout engine is slow on many."""
    columns = min(4, panels)
    rows = -(-panels // columns)
    scale = 1.0 if panels > 3 else 1.5
    width, height = 2.5 * scale * columns + 0.6, 2.2 * scale * rows + 0.7
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=share_y)
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.1 / width, bottom=0.6 / height, top=1 - 0.3 / height, wspace=0.25, hspace=0.4
    )
    figure.supxlabel(xlabel, fontsize=9, y=0.12 / height)
    figure.supylabel(ylabel, fontsize=9, x=0.12 / width)
    axes = [panel for row in grid for panel in row]
    for panel in axes[panels:]:
        panel.remove()
    for panel in axes[max(0, panels - columns) : panels]:
        panel.tick_params(labelbottom=True)
    for panel in axes[:panels]:
        panel.tick_params(labelsize=7)
        panel.grid(True, color="#DDDDDD", linewidth=0.5)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, axes[:panels]


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the i-th line; the first 16 markers all differ, filled ones and open ones."""
    colour = COLOURS[index % len(COLOURS)]
    return {
        "color": colour,
        "markerfacecolor": "white" if index // len(COLOURS) % 2 else colour,
        "linestyle": LINE_STYLES[(index + index // len(COLOURS)) % len(LINE_STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def tidy(axes: Axes, *, xlabel: str, ylabel: str) -> None:
    """Label both axes, keep a light grid behind the data and drop the frame's far sides."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_text(text: str) -> str:
    """A text of strangers as matplotlib can draw it.

    It takes ``$`` for mathematics, hides labels that begin with ``_``, and draws an empty box for what its font has
    no glyph for, which an escape stands for here; tables and pages have the text itself.
    """
    shown = one_line(text).replace("$", r"\$")
    if not shown.isascii():
        glyphs = _glyphs(tuple(FontProperties().get_family()))
        shown = "".join(c if ord(c) in glyphs else ascii(c)[1:-1] for c in shown)
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _glyphs(families: tuple[str, ...]) -> frozenset[int]:
    """The code points that the fonts of these families can draw."""
    found: set[int] = set()
    for family in families:
        found |= get_font(findfont(FontProperties(family=[family]))).get_charmap().keys()
    return frozenset(found)


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG; equal figures give equal bytes (no date, no version of the software)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure atomically as PNG."""
    write_atomically(path, png_bytes(figure, DPI))


def pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """The figure as RGB pixels, uint8 (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


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
