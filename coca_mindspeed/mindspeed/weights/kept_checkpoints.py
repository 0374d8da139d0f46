"""Only the newest checkpoints are kept: MindSpeed-RL keeps all, and one of 7 billion parameters takes 107 GB."""

import re
import shutil
from pathlib import Path
from typing import Any

from coca_mindspeed.mindspeed.start.process import process_settings

_FOLDER = re.compile(r"iter_(\d{7,})$")
_DOOMED = ".removed"


def prune_checkpoints(directory: Path, keep: int, newest: int) -> None:
    """Remove all but the ``keep`` newest checkpoints up to iteration ``newest``.

    Several processes may do so at once, on a folder of each node's own or on one that they share: a folder is renamed
    first, by one of them, and so never looks like a checkpoint while only a part of it is left.

    Args:
        directory: where Megatron saves.
        keep: checkpoints that stay, at least 1.
        newest: iteration of the newest whole checkpoint; folders of later ones, of a save that was cut off, stay.
    """
    if not directory.is_dir():
        return  # a node whose ranks write nothing
    folders = {int(found[1]): path for path in directory.iterdir() if (found := _FOLDER.match(path.name))}
    finished = sorted(iteration for iteration in folders if iteration <= newest)
    for iteration in finished[:-keep]:
        folder = folders[iteration]
        try:
            folder.rename(folder.with_name(f"{folder.name}{_DOOMED}"))
        except FileNotFoundError:
            continue  # another process was faster
    for doomed in directory.glob(f"iter_*{_DOOMED}"):  # also of a process that was killed while it removed one
        shutil.rmtree(doomed, onerror=_unless_gone)


def _unless_gone(_function: Any, _path: str, failure: Any) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def pruning(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.save_ckpt``, at whose end every rank has written and Megatron's tracker names it."""

    def save_ckpt(self: Any, iteration: int) -> None:
        original(self, iteration)
        keep = process_settings().coca.keep_checkpoints
        if keep is not None:
            prune_checkpoints(Path(self.megatron_config.save), keep, iteration)

    return save_ckpt
