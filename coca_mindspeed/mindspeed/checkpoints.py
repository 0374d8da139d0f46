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


def check_checkpoint(directory: Path, iteration: int | None = None) -> Path:
    """The folder of a checkpoint in ``directory``, by default of the newest.

    Raises ConfigError if there is none, it is empty, or the iteration has no complete checkpoint.
    """
    tracker = directory / _TRACKER
    if not tracker.is_file():
        raise ConfigError(f"{directory}: is not a Megatron checkpoint: it has no {_TRACKER}")
    newest = newest_iteration(directory)
    if iteration is not None and iteration not in (complete := _iterations(directory, newest or 0)):
        raise ConfigError(f"{directory}: has no checkpoint of iteration {iteration}, only of {list(complete)}")
    wanted = newest if iteration is None else iteration
    folder = directory / ("release" if wanted is None else f"iter_{wanted:07d}")
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigError(f"{folder}: holds no weights, although {tracker.name} names it")
    return folder


def select_checkpoint(directory: Path, iteration: int, selection: Path) -> None:
    """Make ``selection`` a directory whose newest checkpoint is a link to the folder of ``iteration``."""
    folder = check_checkpoint(directory, iteration)
    selection.mkdir(exist_ok=True)
    (selection / _TRACKER).write_text(str(iteration), encoding="utf-8")
    (selection / folder.name).unlink(missing_ok=True)
    (selection / folder.name).symlink_to(folder.absolute())


def _iterations(directory: Path, newest: int) -> dict[int, Path]:
    """Checkpoint folders by iteration, in order; those after ``newest`` are of an interrupted save."""
    folders = {int(found[1]): path for path in directory.iterdir() if (found := _FOLDER.match(path.name))}
    return {iteration: folders[iteration] for iteration in sorted(folders) if iteration <= newest}


def checkpoint_layout(directory: Path, iteration: int | None = None) -> CheckpointLayout:
    """TP and PP of :func:`check_checkpoint`'s folder; raises ``ConfigError`` if ranks are missing."""
    folder = check_checkpoint(directory, iteration)
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
    for folder in list(_iterations(directory, newest).values())[:-keep]:
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
