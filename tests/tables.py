"""Tables of cases beside the tests: tab-separated values with a heading line."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

#: Steps through the rows of a long table, for ``parametrize``: ``make test`` takes every third row, ``nightly`` all.
EVERY = [3, pytest.param(1, marks=pytest.mark.nightly)]


def read_table(test: str, name: str) -> list[list[str]]:
    """The rows of ``name`` in the folder of a test module (``__file__``), without the heading."""
    _, *rows = Path(test).with_name(name).read_text(encoding="utf-8").splitlines()
    return [row.split("\t") for row in rows]


def check_rows(check: Callable[..., None], rows: Iterable[Sequence[Any]]) -> None:
    """Call ``check`` with each row in one test, which fails with every row that fails and its error."""
    failures = []
    for row in rows:
        try:
            check(*row)
        except Exception as error:  # noqa: BLE001 - whatever a row raises, the rows behind it are checked too
            failures.append(f"{row}: {type(error).__name__}: {error}")
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} rows failed", *failures]), pytrace=False)
