"""What every figure shares: colours, line styles, and saving to the same bytes every time.

Figures are made with matplotlib's objects (``Figure`` and the Agg canvas) and never with pyplot, whose global state
is not safe in a trainer's threads.  Colours are Okabe and Ito's, told apart by colour-blind readers; line styles,
markers and hatches say the same again in black and white.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from coca_mindspeed.files import write_atomically

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


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the i-th line; the first 32 lines all differ."""
    return {
        "color": COLOURS[index % len(COLOURS)],
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


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG; equal figures give equal bytes (no date, no version of the software)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write the figure atomically as PNG."""
    write_atomically(path, png_bytes(figure, dpi))


def pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """The figure as RGB pixels, uint8 (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()
