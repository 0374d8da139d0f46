"""What the commands print: text as it is, at any width.

Paths, labels and data are no markup and no orders to the terminal; lines are left whole, so that a path can be copied;
and a table loses no number, however narrow the terminal.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from coca_mindspeed.safe_text import printable

_UNLIMITED = 10_000  # columns; what reads a pipe or a file has no edge to wrap at


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print a line, or several, neither wrapped nor obeyed.

    Args:
        text: what to print; see :func:`~coca_mindspeed.safe_text.printable`.
        file: where to; None for standard output.
    """
    stream = sys.stdout if file is None else file
    line = f"{printable(str(text))}\n"
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding))


def print_failure(message: object, code: int) -> int:
    """Say on standard error why a command failed, and return the exit code that it ends with."""
    print_text(f"coca-mindspeed: {message}", sys.stderr)
    return code


class PlainConsole(Console):
    """A console for which square brackets, colons and control characters in a string are only characters.

    Strings are never wrapped.  Tables are as wide as they need to be in a pipe or a file, unless COLUMNS says
    otherwise, and fit the terminal where there is one: a table that does not fit by wrapping its words is printed as
    a list of its rows.
    """

    def __init__(self, *, stderr: bool = False, file: TextIO | None = None, width: int | None = None) -> None:
        super().__init__(
            stderr=stderr, file=file, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        if width is None and not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def render_str(self, text: str, **options: Any) -> Text:
        """See :class:`rich.console.Console`; the text is made printable first."""
        return super().render_str(printable(text), **options)

    def print_table(self, table: Table) -> None:
        """Print a table, or, where its longest words do not fit side by side, each row as lines of heading and cell."""
        unlimited = self.options.update(width=_UNLIMITED)
        wanted = [Measurement.get(self, unlimited, Group(column.header, *column.cells)) for column in table.columns]
        whole = Measurement.get(self, unlimited, table)
        edges = whole.maximum - sum(column.maximum for column in wanted)
        spare = self.width - edges - sum(column.minimum for column in wanted)
        if whole.maximum > self.width and spare < 0:
            self.print(_as_list(table))
            return
        if whole.maximum > self.width:
            # Rich takes from the widest columns whatever their words need.
            _share(spare, table, wanted)
        self.print(table)


def _share(spare: int, table: Table, wanted: Sequence[Measurement]) -> None:
    """Give each column the width of its longest word, and part of the spare width to those that want more."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index].span)
    for place, index in enumerate(order):
        more = min(wanted[index].span, spare // (len(order) - place))
        table.columns[index].width = wanted[index].minimum + more
        spare -= more


def _as_list(table: Table) -> RenderableType:
    """The rows one under the other, a line for each cell that holds something."""
    lines: list[RenderableType] = [] if table.title is None else [table.title]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        lines.append("")
        for column, cell in zip(table.columns, cells, strict=True):
            if isinstance(cell, str) and cell.strip():
                lines.append(f"{column.header}: {cell}" if column.header else cell)
    return Group(*lines)
