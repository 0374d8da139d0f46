"""Markdown tables."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from rich.table import Table

from coca_mindspeed.utils.console import PlainConsole, one_line, print_text, terminal_text


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
