"""Pages of results: a table between marks, and figures with their intervals."""

from pathlib import Path

from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.evaluation.metrics import show, show_range
from coca_mindspeed.utils.files import write_atomically


def renew(page: Path, begin: str, text: str, end: str) -> None:
    """Put ``text`` between two marks, each a line; a page without them gets them at its end."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin) if page.exists() else ("", "", "")
    after = rest.partition(end)[2] if found else ""
    write_atomically(page, f"{before}{begin}\n{text}\n{end}{after}")


def with_interval(metric: str, interval: Interval, *, signed: bool = False) -> str:
    """A figure with its bounds, which an undefined one has not."""
    bounds = show_range(metric, interval.low, interval.high, signed=signed)
    figure = show(metric, interval.estimate, signed=signed)
    return f"{figure} ({bounds})" if bounds else figure
