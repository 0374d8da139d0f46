"""Big-Math-Verified, the paper's math training set (SynthLabsAI/Big-Math-RL-Verified)."""

import math
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.sources.fields import RowError, column, describe, optional, scalar_text, text

COLUMNS = frozenset({"problem", "answer", "source", "domain", "llama8b_solve_rate"})


def big_math(row: Mapping[str, Any], number: int) -> Record:
    """Convert a row with ``problem``, ``answer``, ``source``, ``domain``, ``llama8b_solve_rate``.

    The solve rate (of 64 attempts by Llama-3.1-8B) becomes ``metadata["solve_rate"]``; ``metadata["difficulty"]`` is
    one minus it, so that 0 is easiest.
    """
    metadata = {**optional(row, source="source", domain="domain"), **_solve_rate(column(row, "llama8b_solve_rate"))}
    return Record(
        f"big_math-{number}", "big_math", "math", text(row, "problem"), scalar_text(row, "answer"), None, metadata
    )


def _solve_rate(value: Any) -> dict[str, float]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise RowError(f"column 'llama8b_solve_rate' should be between 0 and 1 or null, found {describe(value)}")
    return {"solve_rate": float(value), "difficulty": 1.0 - value}
