"""A training's metrics under one set of names, whichever engine wrote them.

The local engine counts steps and writes ``reward/confidence``; the port to MindSpeed-RL counts iterations and keeps
that project's style, ``coca/confidence_reward``.  Figures and views know the first kind only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.files import read_json_lines

# The port's name -> ours.
_NAMES: Mapping[str, str] = {
    "iteration": "step",
    "coca/confidence_reward": "reward/confidence",
    "coca/answer_reward": "reward/answer",
    "coca/batch_ece": "rollout/ece",
    "coca/auroc": "rollout/auroc",
    "coca/brier": "rollout/brier",
    "response_length/mean": "response/length",
}
_VALIDATION, _EVALUATION = "validation/", "eval/"


def common_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with our names; a name of ours that is already there wins."""
    renamed = {}
    for name, value in row.items():
        known = _NAMES.get(name, name)
        renamed[known.replace(_VALIDATION, _EVALUATION, 1) if known.startswith(_VALIDATION) else known] = value
    lengths = [row.get("coca/confidence_length"), row.get("coca/answer_length")]
    if "response/length" not in renamed and None not in lengths:
        renamed["response/length"] = sum(lengths)
    return renamed | {name: row[name] for name in row if name in renamed}


def read_training(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, by our names.

    Raises:
        DataError: a row has no whole-number ``step`` or ``iteration``.
    """
    rows = []
    for number, row in read_json_lines(path):
        named = common_names(row)
        if not isinstance(named.get("step"), int):
            raise DataError(f"{path}:{number}: expected a whole-number 'step', found {named.get('step')!r}")
        rows.append(named)
    return rows
