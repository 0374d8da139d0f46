"""The checkpoint with the best held-out metric: ``trainer.checkpoint_callback_class``.

verl calls ``on_save`` after each checkpoint, before it validates the same step; our trainers call ``on_validate`` then.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.scoring.metrics import BestValue
from coca_mindspeed.verl.settings import verl_settings

DIRECTORY = "best"


class BestCheckpoint:
    """Keeps the checkpoint with the best ``coca.best_metric`` in ``best/`` of ``trainer.default_local_dir``.

    ``best/`` holds ``global_step_N``, whose files are hard links (copies where the file system has none), and
    ``best.json``.  Only steps that save and validate take part.
    """

    def __init__(self, config: Any = None) -> None:
        """Read the best value so far, if it is of the same metric; ``config`` is verl's whole configuration."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        directory = Path(plain["trainer"]["default_local_dir"]) / DIRECTORY
        self._best = BestValue(directory, verl_settings(plain).best_metric)
        self._saved: tuple[int, Path] | None = None

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_others: Any) -> None:
        """Remember the step's checkpoint."""
        self._saved = global_step, Path(checkpoint_dir)

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the checkpoint of ``step`` if it has one and its metric is better; a NaN is not."""
        if self._saved is None or self._saved[0] != step or not self._best.improves(metrics):
            return
        checkpoint = self._saved[1]
        with self._best.replace(step, metrics) as writing:
            shutil.copytree(checkpoint, writing / checkpoint.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
