"""Plots of reports.

Figures use matplotlib's objects (``Figure`` and the Agg canvas), never pyplot, whose global state is not safe in a
trainer's threads.  Colours are Okabe and Ito's for colour-blind readers; line styles, markers and hatches repeat them
for black and white.
"""

import io
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
from matplotlib.lines import Line2D

from coca_mindspeed.evaluation.metrics import (
    METRIC_SPECS,
    BinsClosed,
    MetricOptions,
    bin_table,
    calibration_metrics,
    risk_coverage,
    show,
)
from coca_mindspeed.evaluation.predictions import GradedPredictions
from coca_mindspeed.utils.console import one_line
from coca_mindspeed.utils.files import write_atomically

DPI = 120
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#555555"
SKY = "#8CC5EC"  # light enough for black hatches and error bars on top
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8F7A00")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with an Agg canvas and its axes by row and column; size in inches."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of line ``index``; the first 16 markers all differ."""
    colour = COLOURS[index % len(COLOURS)]
    return {
        "color": colour,
        "markerfacecolor": "white" if index // len(COLOURS) % 2 else colour,
        "linestyle": LINE_STYLES[(index + index // len(COLOURS)) % len(LINE_STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def tidy(axes: Axes, *, xlabel: str = "", ylabel: str = "") -> None:
    """Label both axes, draw a light grid behind the data and hide the top and right spines."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_text(text: str) -> str:
    """Escape text for matplotlib.

    It parses ``$`` as mathematics, hides labels that begin with ``_``, and draws an empty box for characters missing
    in its font; these become escapes.
    """
    shown = one_line(text).replace("$", r"\$")
    if not shown.isascii():
        glyphs = _glyphs(tuple(FontProperties().get_family()))
        shown = "".join(c if ord(c) in glyphs else ascii(c)[1:-1] for c in shown)
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _glyphs(families: tuple[str, ...]) -> frozenset[int]:
    """Code points that the fonts of these families can draw."""
    characters: set[int] = set()
    for family in families:
        characters |= get_font(findfont(FontProperties(family=[family]))).get_charmap().keys()
    return frozenset(characters)


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """Return the figure as PNG without date and software version: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    write_atomically(path, png_bytes(figure))


MetricRows = Sequence[Mapping[str, Any]]
NamedPredictions = Mapping[str, GradedPredictions]

# Title, unit, and the keys of metrics.jsonl: the first that a run has is drawn.
TRAINING_PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Confidence reward", "mean reward", ("reward/confidence",)),
    ("Answer reward", "mean reward", ("reward/answer",)),
    ("Expected calibration error", "ECE", ("rollout/ece", "eval/ece")),
    ("Response length", "tokens", ("response/length",)),
)


def reliability_diagram(groups: NamedPredictions, closed: BinsClosed = "right") -> Figure:
    """Draw a reliability diagram for each title, with the number of answers of each bin and 95% intervals."""
    columns, scale = min(4, len(groups)), 1.0 if len(groups) > 3 else 1.5
    rows = -(-len(groups) // columns)
    figure, grid = new_figure(rows, columns, (max(2.5 * scale * columns + 0.6, 6.0), 2.2 * scale * rows + 1.1))
    panels = [axes for row in grid for axes in row]
    for axes in panels[len(groups) :]:
        axes.remove()
    panels = panels[: len(groups)]
    filled: dict[str, Any] = {"fill": True, "facecolor": SKY, "edgecolor": "black", "linewidth": 0.6}
    hatched: dict[str, Any] = {"fill": True, "facecolor": "none", "edgecolor": VERMILION, "hatch": "/////"}
    for axes, (label, data) in zip(panels, groups.items(), strict=True):
        table = bin_table(data.confidence, data.correct, closed=closed)
        full = table.count > 0
        middle = (table.edges[:-1] + table.edges[1:])[full] / 2
        accuracy, stated = np.nan_to_num(table.accuracy), np.nan_to_num(table.confidence)
        # One outline is drawn several times faster than a rectangle per bin.
        axes.stairs(accuracy, table.edges, label="fraction correct", **filled)
        low, high = np.minimum(stated, accuracy), np.maximum(stated, accuracy)
        axes.stairs(high, table.edges, baseline=low, linewidth=0.8, label="gap to stated confidence", **hatched)
        axes.vlines(middle, table.low[full], table.high[full], color="black", linewidth=1.2, label="95% interval")
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=0.9, label="perfect calibration")
        for x, count in zip(middle, table.count[full], strict=True):
            axes.text(x, 1.03, f"{count}", fontsize=6, ha="center", rotation=60, va="bottom")
        if not full.any():
            _say_why(axes, _NO_CONFIDENCE)
        axes.set(xlim=(0, 1), ylim=(0, 1.2), yticks=np.arange(6) / 5)
        axes.tick_params(labelsize=7)
        tidy(axes, xlabel="stated confidence", ylabel="fraction correct")
        values = calibration_metrics(data.confidence, data.correct, options=MetricOptions(closed=closed)).values
        shown = "  ".join(f"{METRIC_SPECS[m].label} {show(m, values[m])}" for m in ("ece", "auroc", "accuracy"))
        axes.set_title(f"{plot_text(label)}\n{shown}", fontsize=8)
    counts = Line2D([], [], color="black", linestyle="none", marker="$12$", markersize=9, label="number of answers")
    _legend(figure, panels, [counts])
    return figure


def reliability_image(data: GradedPredictions, *, title: str) -> npt.NDArray[np.uint8]:
    """Return a reliability diagram for TensorBoard (``dataformats="HWC"``): uint8 (height, width, 3)."""
    canvas = FigureCanvasAgg(reliability_diagram({title: data}))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _curve(rows: MetricRows, keys: Sequence[str]) -> tuple[list[float], list[float]]:
    """Steps and values of the first of ``keys`` that the rows have."""
    for key in keys:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            return [float(step) for step, _ in points], [float(value) for _, value in points]
    return [], []


def _draw_averages(
    axes: Axes, steps: Sequence[float], values: Sequence[float], window: int, index: int, label: str
) -> None:
    """Draw line ``index``: the moving average over ``window`` values; without a label, without markers too."""
    averages = [np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    style = line_style(index) | {"markevery": max(1, len(steps) // 8), "markersize": 5, "linewidth": 1.6}
    style |= {} if label or len(steps) == 1 else {"marker": ""}
    axes.plot(steps, averages, **style, label=label)


def training_curves(runs: Mapping[str, MetricRows]) -> Figure:
    """Draw confidence reward, answer reward, ECE and response length over training steps.

    ``runs`` is label -> objects of metrics.jsonl.  The moving average over a twentieth of the run is drawn over the
    faint raw curve.
    """
    figure, [first, second] = new_figure(2, 2, (9.0, 6.0))
    panels, averaged = [*first, *second], False
    faint: dict[str, Any] = {"alpha": 0.25, "linewidth": 0.8}
    for axes, (title, unit, keys) in zip(panels, TRAINING_PANELS, strict=True):
        for index, (label, run) in enumerate(runs.items()):
            steps, values = _curve(run, keys)
            if not steps:
                continue
            window = max(1, len(steps) // 20)
            if window > 1:
                averaged = True
                axes.plot(steps, values, color=line_style(index)["color"], **faint)
            _draw_averages(axes, steps, values, window, index, plot_text(label))
        if not axes.lines:
            logged = any(key in row for rows in runs.values() for row in rows for key in keys)
            _say_why(axes, f"{keys[0]} is {'undefined in every step' if logged else 'not in the metrics'}")
        axes.set_title(title, fontsize=10)
        tidy(axes, xlabel="training step", ylabel=unit)
    colour = GREY if len(runs) > 1 else BLUE
    raw = Line2D([], [], color=colour, label="each step", **faint)
    mean = Line2D([], [], color=colour, linewidth=1.6, label=_MOVING_AVERAGE)
    _legend(figure, panels, [raw, mean] if averaged else [])
    return figure


_MOVING_AVERAGE = "moving average over a twentieth of the steps"
_SIGHTS = {"first_sight": "rollout, at first sight", "repeated": "rollout, asked before", "held_out": "held out"}


def gap_curves(rows: MetricRows) -> Figure:
    """Draw accuracy, stated confidence and their difference over training steps, from objects of metrics.jsonl.

    A line each for the questions at first sight, those asked before, and the held-out ones; the first two are moving
    averages over a twentieth of the run.
    """
    figure, [panels] = new_figure(1, 3, (12.0, 3.8))
    for index, (name, label) in enumerate(_SIGHTS.items()):
        keys = [f"{name}/{key}" for key in ("accuracy", "confidence")]
        known = [row for row in rows if all(row.get(key) is not None for key in keys)]
        if not known:
            continue
        steps = [float(row["step"]) for row in known]
        right, stated = (np.array([float(row[key]) for row in known]) for key in keys)
        window = 1 if name == "held_out" else max(1, len(steps) // 20)
        for axes, values in zip(panels, (right, stated, stated - right), strict=True):
            name_of_line = label if window == 1 else f"{label}, moving average"
            _draw_averages(axes, steps, values.tolist(), window, index, name_of_line)
    if not panels[2].lines:
        _say_why(panels[2], "no response with a valid confidence")
    panels[2].axhline(0, color=GREY, linestyle="--", linewidth=0.9, label="stated equals right")
    for axes, title in zip(panels, ("Right", "Stated", "Stated minus right"), strict=True):
        axes.set_title(title, fontsize=10)
        tidy(axes, xlabel="training step")
        if axes is not panels[2]:
            axes.set_ylim(0, 1)
    _legend(figure, panels)
    return figure


def risk_coverage_curves(groups: NamedPredictions) -> Figure:
    """Draw risk against coverage, a line for each run."""
    figure, [[axes]] = new_figure(1, 1, (6.0, 4.8))
    for index, (label, data) in enumerate(groups.items()):
        coverage, error = risk_coverage(data.confidence, data.correct)
        if len(coverage):
            style = line_style(index) | {"linewidth": 1.4, "markersize": 4, "markevery": max(1, len(coverage) // 8)}
            axes.plot(coverage, error, **style, label=plot_text(label))
    if not axes.lines:
        _say_why(axes, _NO_CONFIDENCE)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    tidy(axes, xlabel="coverage (share of most confident answers)", ylabel="error rate of those")
    _legend(figure, [axes])
    return figure


_NO_CONFIDENCE = "no valid confidence"


def _say_why(axes: Axes, reason: str) -> None:
    """Write into an empty panel why it is empty."""
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", fontsize=9)


def _legend(figure: Figure, panels: Sequence[Axes], further: Sequence[Line2D] = ()) -> None:
    """Draw the legend of the panel with most entries, and ``further`` ones, below the figure."""
    handles = [*max((axes.get_legend_handles_labels()[0] for axes in panels), key=len), *further]
    for columns in range(min(5, len(handles)), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()
