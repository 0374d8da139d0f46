"""Reports: a self-contained HTML page, and Markdown with separate plots."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from coca_mindspeed import __version__
from coca_mindspeed.evaluation import plots
from coca_mindspeed.evaluation.metrics import FURTHER_METRICS, HEADLINE_METRICS, METRIC_SPECS
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.evaluation.scoreboard import Scoreboard
from coca_mindspeed.evaluation.tables import result_tables, risk_tables
from coca_mindspeed.utils.console import markdown_cell, printable
from coca_mindspeed.utils.files import write_atomically

_REPORT_DPI = 100
_SHOWN_CHARACTERS = 1200
_NO_PREDICTIONS = (
    "The runs hold no predictions, so there are no results: set data.evaluate, and evaluation.final_questions above 0."
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot with its caption."""

    name: str
    heading: str
    caption: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


def _pictures(board: Scoreboard, runs: Sequence[Run]) -> list[Picture]:
    pictures = []

    def add(name: str, heading: str, caption: str, figure: Figure) -> None:
        pictures.append(Picture(name, heading, caption, plots.png_bytes(figure, _REPORT_DPI)))

    if training := {run.label: run.training for run in runs if run.training}:
        caption = "A line for each run; faint: every step, strong: moving average."
        add("training", "Training", caption, plots.training_curves(training))
    closed = board.options.closed
    reliability = (
        "Filled: fraction correct; hatched: gap to the stated confidence; vertical lines: 95% intervals; "
        f"dashed: perfect calibration; above each bar its number of answers. Bins are closed on the {closed}."
    )
    thresholds = "Left: error rate when only the most confident answers are given. Right: the area is AUROC."
    for dataset in board.datasets:
        groups = {run.label: outcomes(rows) for run in board.runs if (rows := run.by_dataset().get(dataset))}
        slug = "".join(c if c.isalnum() else "_" for c in dataset)
        add(f"reliability_{slug}", f"Reliability: {dataset}", reliability, plots.reliability_diagram(groups, closed))
        heading = f"Risk-coverage and ROC curves: {dataset}"
        add(f"thresholds_{slug}", heading, thresholds, plots.threshold_curves(groups))
    return pictures


def most_miscalibrated(run: Run, count: int) -> list[Prediction]:
    """Return the ``count`` responses of each data set whose confidence is furthest from correctness, worst first."""

    def place(p: Prediction) -> tuple[object, ...]:
        return -abs((p.confidence or 0.0) - bool(p.correct)), p.key

    stated = [[p for p in rows if p.confidence is not None] for rows in run.by_dataset().values()]
    return sorted((p for rows in stated for p in sorted(rows, key=place)[:count]), key=lambda p: place(p)[:1])


def shorten(text: str) -> str:
    """Cut the middle out of a long text."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def write_report(
    runs: Sequence[Run],
    directory: Path,
    *,
    title: str = "Calibration report",
    board: Scoreboard | None = None,
    samples: int = 3,
) -> list[Path]:
    """Write ``report.html`` (self-contained), ``report.md`` and ``figures/*.png``; return the paths of the first two.

    ``board`` has the numbers of ``runs``, if already computed; ``samples`` responses are shown per run and data set.
    """
    board = board or Scoreboard(runs)
    pictures = _pictures(board, runs)
    content = {
        "title": title,
        "version": __version__,
        "board": board,
        "legend": METRIC_SPECS.values(),
        "tables": result_tables(board, HEADLINE_METRICS),
        "further": result_tables(board, FURTHER_METRICS),
        "deciding": risk_tables(board),
        "pictures": pictures,
        "samples": [(run.label, most_miscalibrated(run, samples)) for run in board.runs],
        "no_predictions": _NO_PREDICTIONS,
    }
    environment = Environment(
        loader=PackageLoader("coca_mindspeed.evaluation", "templates"),
        # Text of models must not become markup in the page.
        autoescape=lambda name: name is not None and "html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control characters become escapes.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    environment.filters |= {"cell": markdown_cell, "shorten": shorten}
    paths = [directory / "report.html", directory / "report.md"]
    for picture in pictures:
        write_atomically(directory / "figures" / f"{picture.name}.png", picture.png)
    for path in paths:
        write_atomically(path, environment.get_template(f"{path.name}.j2").render(content))
    return paths
