"""Tables of cases beside the tests: tab-separated values with a heading line."""

from pathlib import Path


def read_table(test: str, name: str) -> list[list[str]]:
    """The rows of ``name`` in the folder of a test module (``__file__``), without the heading."""
    _, *rows = Path(test).with_name(name).read_text(encoding="utf-8").splitlines()
    return [row.split("\t") for row in rows]
