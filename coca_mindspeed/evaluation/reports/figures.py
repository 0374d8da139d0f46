"""What every figure shares: colours, line styles, and saving to the same bytes every time.

Figures are made with matplotlib's objects (``Figure`` and the Agg canvas) and never with pyplot, whose global state
is not safe in a trainer's threads.  Colours are Okabe and Ito's, told apart by colour-blind readers; line styles,
markers and hatches say the same again in black and white.
"""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from coca_mindspeed.files import write_atomically
from coca_mindspeed.safe_text import one_line

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
