"""Safe console output and Markdown tables: text is never interpreted as terminal escapes or rich markup."""

import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_KEPT = frozenset("\n\t")
# They reorder the text around them.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control, half of a pair, line and paragraph separators


def printable(text: str) -> str:
    r"""Return the text with control characters as escapes (``\x1b``); line ends and tabs stay."""
    # The first test is fast and covers most text.  The object itself is returned, which may be a template's markup.
    if (text.isascii() and text.isprintable()) or not any(map(_is_unprintable, text)):
        return text
    return "".join(ascii(c)[1:-1] if _is_unprintable(c) else c for c in text)


def one_line(text: str) -> str:
    """Return :func:`printable` text on one line, with single spaces."""
    return printable(" ".join(text.split()))


def without_password(text: str) -> str:
    """A URL, or a text with URLs, without the user's name and password in them."""
    return re.sub(r"(?<=:)(/{1,2})[^/?#\s]*@", r"\1", text)


def terminal_text(text: str) -> Text:
    """Return text for rich, which parses plain strings as markup."""
    return Text(printable(text))


def _is_unprintable(character: str) -> bool:
    return character in _REORDERING or (character not in _KEPT and unicodedata.category(character) in _UNPRINTABLE)


_UNLIMITED = 10_000  # columns; what reads a pipe or a file has no edge to wrap at


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print text without wrapping or interpretation; ``file`` None is standard output."""
    stream = sys.stdout if file is None else file
    line = f"{printable(str(text))}\n"
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()  # standard output and standard error keep their order in one log file


def print_note(text: object) -> None:
    """:func:`print_text` on standard error."""
    print_text(text, sys.stderr)


def print_failure(message: object, code: int, program: str = "coca-mindspeed") -> int:
    """Print why a command of ``program`` failed on standard error, and return its exit code."""
    print_note(f"{program}: {message}")
    return code


class PlainConsole(Console):
    """A console that does not interpret brackets, colons or control characters in strings, and does not wrap them.

    In a pipe or a file, tables are as wide as needed, unless COLUMNS is set.  On a terminal they are fitted; a table
    whose words do not fit is printed as a list of its rows.
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
        """Print a table, or a list of its rows if the longest words do not fit next to each other."""
        unlimited = self.options.update(width=_UNLIMITED)
        wanted = [Measurement.get(self, unlimited, Group(column.header, *column.cells)) for column in table.columns]
        whole = Measurement.get(self, unlimited, table)
        if whole.maximum > self.width:
            edges = whole.maximum - sum(column.maximum for column in wanted)
            spare = self.width - edges - sum(column.minimum for column in wanted)
            if spare < 0:
                self.print(_as_list(table))
                return
            # Each column gets the width of its longest word and a share of the rest; rich would take from the widest.
            order = sorted(range(len(wanted)), key=lambda index: wanted[index].span)
            for place, index in enumerate(order):
                more = min(wanted[index].span, spare // (len(order) - place))
                table.columns[index].width = wanted[index].minimum + more
                spare -= more
        self.print(table)


def _as_list(table: Table) -> RenderableType:
    """The rows below each other, a line for each non-empty cell."""
    lines: list[RenderableType] = [] if table.title is None else [table.title]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        lines.append("")
        for column, cell in zip(table.columns, cells, strict=True):
            if isinstance(cell, str) and cell.strip():
                lines.append(f"{column.header}: {cell}" if column.header else cell)
    return Group(*lines)


def markdown_cell(text: object) -> str:
    """Return text for a Markdown table: one line, with bars escaped."""
    return one_line(str(text)).replace("|", "\\|")


def markdown_table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Collection[int] = (), padded: bool = True
) -> str:
    """Return a Markdown table; the columns in ``numbers`` are right-aligned, ``padded`` aligns the plain text too."""
    lines = [[markdown_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) if padded else 0 for i in range(len(header))]
    marks = [":" if i in numbers else "-" for i in range(len(header))]
    rule = ["-" * (width + 1) + mark if padded else f" --{mark} " for width, mark in zip(widths, marks, strict=True)]
    sides = [f"{'>' if mark == ':' else '<'}{width or ''}" for width, mark in zip(widths, marks, strict=True)]
    aligned = [[f"{cell:{side}}" for cell, side in zip(line, sides, strict=True)] for line in lines]
    first, *others = [f"| {' | '.join(cells)} |" for cells in aligned]
    return "\n".join([first, f"|{'|'.join(rule)}|", *others]) + "\n"


def print_markdown(text: str) -> None:
    """Print Markdown on standard output; on a terminal, tables are fitted to its width."""
    console = PlainConsole()
    if not console.is_terminal:
        print_text(text.removesuffix("\n"))
        return
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if not is_table:
            print_text("\n".join(lines))
            continue
        header, rule, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        table = Table()
        for name, mark in zip(header, rule, strict=True):
            table.add_column(terminal_text(_unescaped(name)), justify="right" if mark.endswith(":") else "left")
        for cells in rows:
            table.add_row(*map(_unescaped, cells))
        console.print_table(table)


def _unescaped(cell: str) -> str:
    return cell.replace("\\|", "|").strip("`")


def duration(seconds: float) -> str:
    """Format a duration: ``50 s``, ``4 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
