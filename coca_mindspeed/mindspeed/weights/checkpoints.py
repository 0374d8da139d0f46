"""Megatron checkpoints: the newest iteration, its TP and PP layout, and retention."""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start.process import process_settings

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's: the newest complete checkpoint's iteration, or "release"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?$")
_FOLDER = re.compile(r"iter_(\d{7,})$")
_REMOVED = ".removed"


class CheckpointLayout(NamedTuple):
    """Ranks that a checkpoint has weights for."""

    tp: int
    pp: int


def newest_iteration(directory: Path) -> int | None:
    """The iteration of the newest checkpoint; None where there is none or only converted weights."""
    tracker = directory / _TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if text == "release":  # written by a converter
        return None
    if not text.isdecimal():
        raise ConfigError(f"{tracker}: expected an iteration's number, found {text!r}")
    return int(text)


def check_checkpoint(directory: Path) -> Path:
    """The folder of the newest checkpoint in ``directory``; raises ``ConfigError`` if there is none or it is empty."""
    tracker = directory / _TRACKER
    if not tracker.is_file():
        raise ConfigError(f"{directory}: is not a Megatron checkpoint: it has no {_TRACKER}")
    iteration = newest_iteration(directory)
    folder = directory / ("release" if iteration is None else f"iter_{iteration:07d}")
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigError(f"{folder}: holds no weights, although {tracker.name} names it")
    return folder


def checkpoint_layout(directory: Path) -> CheckpointLayout:
    """TP and PP of the newest checkpoint; raises ``ConfigError`` if there is none or ranks are missing."""
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


def prune_checkpoints(directory: Path, keep: int, newest: int) -> None:
    """Remove all but the ``keep`` (at least 1) newest checkpoints up to iteration ``newest``.

    Folders of later iterations, of an interrupted save, stay.  Several processes may prune one folder at once: one of
    them renames a checkpoint before it is removed, so a partly removed folder never looks like a checkpoint.
    """
    if not directory.is_dir():
        return  # a node whose ranks write nothing
    folders = {int(found[1]): path for path in directory.iterdir() if (found := _FOLDER.match(path.name))}
    finished = sorted(iteration for iteration in folders if iteration <= newest)
    for iteration in finished[:-keep]:
        folder = folders[iteration]
        try:
            folder.rename(folder.with_name(f"{folder.name}{_REMOVED}"))
        except FileNotFoundError:
            continue  # another process was faster
    for folder in directory.glob(f"iter_*{_REMOVED}"):  # also of a process that was killed meanwhile
        shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(_function: Any, _path: str, failure: Any) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def prune_after_save(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.save_ckpt``; when it returns, every rank has written and the tracker is updated."""

    def save_ckpt(self: Any, iteration: int) -> None:
        original(self, iteration)
        keep = process_settings().coca.keep_checkpoints
        if keep is not None:
            prune_checkpoints(Path(self.megatron_config.save), keep, iteration)

    return save_ckpt
