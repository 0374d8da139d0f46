"""A validation of verl's, as this project's metrics and predictions."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coca_mindspeed.judging.held_out import held_out_metrics
from coca_mindspeed.verl.judged_row import JudgedRow


@dataclass(frozen=True, slots=True)
class JudgedValidation:
    """Judged responses to held-out questions, one each."""

    rows: tuple[JudgedRow, ...]

    def metrics(self) -> dict[str, float]:
        """The paper's six columns under ``eval/``, and for several data sets those of each under its name."""
        by_set: dict[str, list[JudgedRow]] = defaultdict(list)
        for row in self.rows:
            by_set[row.prediction.dataset].append(row)
        found = _named("eval", self.rows)
        if len(by_set) > 1:
            for dataset, rows in by_set.items():
                found |= _named(f"eval/{dataset}", rows)
        return found


def judged_validation(columns: Mapping[str, Sequence[Any]]) -> JudgedValidation:
    """Rows of a validation from verl's lists, one for each entry of what the reward manager said.

    Raises:
        TrainingError: another reward manager judged them.
    """
    ours = [name for name in ("prediction", "verdict", "reason", "confidence_tokens") if name in columns]
    count = len(columns["reward"])
    return JudgedValidation(
        tuple(
            JudgedRow.from_columns({name: columns[name][row] for name in ours}, f"validation response {row}")
            for row in range(count)
        )
    )


def _named(prefix: str, rows: Sequence[JudgedRow]) -> dict[str, float]:
    if not rows:
        return {}
    stated = [math.nan if (s := row.prediction.confidence) is None else s for row in rows]
    metrics = held_out_metrics(
        torch.tensor([bool(row.prediction.correct) for row in rows]),
        torch.tensor([row.prediction.correct is not None for row in rows]),
        torch.tensor(stated, dtype=torch.float64),
        torch.tensor([row.confidence_tokens for row in rows]),
    )
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
