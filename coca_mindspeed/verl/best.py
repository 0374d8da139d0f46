"""The checkpoint with the best held-out metric: ``trainer.checkpoint_callback_class``.

verl calls ``on_save`` after each checkpoint, before it validates the same step; our trainers call ``on_validate`` then.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.evaluation.metrics import METRIC_SPECS
from coca_mindspeed.utils.files import whole_directory
from coca_mindspeed.utils.json_files import read_object, write_json
from coca_mindspeed.verl.settings import verl_settings

DIRECTORY, FILE = "best", "best.json"


class BestCheckpoint:
    """Keeps the checkpoint with the best ``coca.best_metric`` in ``best/`` of ``trainer.default_local_dir``.

    ``best/`` holds ``global_step_N``, whose files are hard links (copies where the file system has none), and
    ``best.json`` with metric, value and step.  Only steps that save and validate take part.
    """

    def __init__(self, config: Any = None) -> None:
        """Read the best value so far, if it is of the same metric; ``config`` is verl's whole configuration."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self._directory = Path(plain["trainer"]["default_local_dir"]) / DIRECTORY
        self._metric = verl_settings(plain).best_metric
        self._sign = METRIC_SPECS[self._metric.removeprefix("eval/")].better
        known = read_object(self._directory / FILE)
        self._best: float = known["value"] if known.get("metric") == self._metric else -math.inf * self._sign
        self._saved: tuple[int, Path] | None = None

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_others: Any) -> None:
        """Remember the step's checkpoint."""
        self._saved = global_step, Path(checkpoint_dir)

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the checkpoint of ``step`` if it has one and its metric is better; a NaN is not."""
        value = metrics.get(self._metric, math.nan)
        if self._saved is None or self._saved[0] != step or not self._sign * value > self._sign * self._best:
            return
        with whole_directory(self._directory) as writing:
            checkpoint = self._saved[1]
            shutil.copytree(checkpoint, writing / checkpoint.name, copy_function=_link)
            write_json(writing / FILE, {"metric": self._metric, "value": value, "step": step})
        self._best = value


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
