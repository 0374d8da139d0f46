"""One table in three forms: Markdown for people, CSV for programs, and a picture, unless it holds texts."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from coca_mindspeed.evaluation.reports.plots import new_figure, plot_text, save_figure
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.markdown import markdown_table


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: a heading.
        note: a sentence or two below it.
        header: column names, as people read them.
        rows: printed cells.
        csv_header: column names of the CSV.
        csv_rows: full values; NaN becomes an empty cell.
        text: its cells are to be read, and a picture of them is of no use.
    """

    name: str
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    csv_header: Sequence[str]
    csv_rows: Sequence[Sequence[str | float]]
    text: bool = False

    def markdown(self) -> str:
        return markdown_table(self.header, self.rows)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.csv_header)
        for row in self.csv_rows:
            writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in row])
        return text.getvalue()


def printed_table(
    name: str, title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]], text: bool = False
) -> Table:
    """A table whose CSV holds what is printed."""
    return Table(name, title, note, header, rows, header, rows, text)


def write_table(table: Table, directory: Path, figure: Figure | None = None) -> str:
    """Write ``name.md``, ``name.csv`` and ``name.png``, and return the Markdown section that a report includes.

    Args:
        table: what is written; where it is ``text``, without a picture.
        directory: where.
        figure: the picture; None draws the table itself.
    """
    picture = "" if table.text else f"![{table.title}]({table.name}.png)\n\n"
    section = (
        f"## {table.title}\n\n{table.note}\n\n{table.markdown()}\n"
        f"{picture}Full values: [{table.name}.csv]({table.name}.csv).\n"
    )
    write_atomically(directory / f"{table.name}.csv", table.csv())
    image = directory / f"{table.name}.png"
    if table.text:
        image.unlink(missing_ok=True)  # of a version that drew it
    else:
        save_figure(figure or picture_of(table), image)
    write_atomically(directory / f"{table.name}.md", section.replace("## ", "# ", 1))
    return section


def picture_of(table: Table) -> Figure:
    """The table drawn as it is printed."""
    longest = [max(len(str(row[i])) for row in (table.header, *table.rows)) for i in range(len(table.header))]
    total = max(1, sum(longest))
    figure, grid = new_figure(1, 1, (min(16.0, max(6.0, 0.085 * total)), 0.6 + 0.26 * len(table.rows)))
    axes = grid[0][0]
    axes.axis("off")
    if table.rows:
        drawn = axes.table(
            cellText=[[plot_text(cell) for cell in row] for row in table.rows],
            colLabels=[plot_text(name) for name in table.header],
            colWidths=[length / total for length in longest],
            cellLoc="left",
            loc="center",
        )
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(7)
    return figure
