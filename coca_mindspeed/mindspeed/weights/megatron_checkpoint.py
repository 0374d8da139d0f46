"""For which TP and PP a Megatron checkpoint was cut, as its folders say."""

import re
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.errors import ConfigError

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's: the newest whole checkpoint's iteration, or "release"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?$")


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Ranks that a checkpoint has weights for."""

    tp: int
    pp: int


def newest_iteration(directory: Path) -> int | None:
    """The iteration of the newest checkpoint, or None where there is none or only converted weights.

    Raises:
        ConfigError: Megatron's tracker file holds something else.
    """
    tracker = directory / _TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if text == "release":  # what a converter writes
        return None
    if not text.isdecimal():
        raise ConfigError(f"{tracker}: expected an iteration's number, found {text!r}")
    return int(text)


def check_checkpoint(directory: Path) -> Path:
    """The folder of the newest checkpoint in ``directory``, whatever Megatron's form and layout of it.

    Raises:
        ConfigError: there is none, or nothing is in it.
    """
    tracker = directory / _TRACKER
    if not tracker.is_file():
        raise ConfigError(f"{directory}: is not a Megatron checkpoint: it has no {_TRACKER}")
    iteration = newest_iteration(directory)
    folder = directory / ("release" if iteration is None else f"iter_{iteration:07d}")
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigError(f"{folder}: holds no weights, and {tracker.name} says that it does")
    return folder


def checkpoint_layout(directory: Path) -> CheckpointLayout:
    """TP and PP of the newest checkpoint in ``directory``.

    Raises:
        ConfigError: there is none, or ranks are missing from it.
    """
    folder = check_checkpoint(directory)
    ranks = {
        (int(found[1]), int(found[2] or 0))
        for path in folder.glob("mp_rank_*")
        if (found := _RANK.match(path.name)) and any(path.iterdir())
    }
    if not ranks:
        raise ConfigError(f"{folder}: holds no weights (no mp_rank_* folder with files)")
    layout = CheckpointLayout(max(tp for tp, _ in ranks) + 1, max(pp for _, pp in ranks) + 1)
    if len(ranks) != layout.tp * layout.pp:
        raise ConfigError(f"{folder}: has {len(ranks)} of the {layout.tp} x {layout.pp} ranks' folders")
    return layout
