"""Markdown tables."""

from collections.abc import Collection, Iterable, Sequence

from coca_mindspeed.utils.console import one_line


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
