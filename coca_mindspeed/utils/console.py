"""Names and texts from data, made fit for the places where people read them.

A model's name or response may hold anything: terminal escapes, ``[markup]``, ``$math$``.  Shown, all of it is text.
"""

import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_KEPT = frozenset("\n\t")
# They reorder what stands beside them, so that a line reads otherwise than it is.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control, half of a pair, line and paragraph separators


def printable(text: str) -> str:
    r"""The text with control characters as escapes (``\x1b``); line ends and tabs stay."""
    # The first is nearly all text, of which a report has tens of thousands of cells.  The text itself comes back, since
    # it may be of a class that says more: markup of a template, for one.
    if (text.isascii() and text.isprintable()) or not any(map(_is_unprintable, text)):
        return text
    return "".join(ascii(c)[1:-1] if _is_unprintable(c) else c for c in text)


def one_line(text: str) -> str:
    """The text as :func:`printable` on one line, runs of white space as single spaces."""
    return printable(" ".join(text.split()))


def terminal_text(text: str) -> Text:
    """Text for rich, which takes plain strings for markup."""
    return Text(printable(text))


def _is_unprintable(character: str) -> bool:
    return character in _REORDERING or (character not in _KEPT and unicodedata.category(character) in _UNPRINTABLE)


_UNLIMITED = 10_000  # columns; what reads a pipe or a file has no edge to wrap at


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print a line, or several, neither wrapped nor obeyed.

    Args:
        text: what to print; see :func:`~coca_mindspeed.utils.console.printable`.
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
