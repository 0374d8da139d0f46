"""The best value of a held-out metric, and the files of its step."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coca_mindspeed.evaluation.metrics import METRIC_SPECS
from coca_mindspeed.utils.files import whole_directory
from coca_mindspeed.utils.json_files import read_object, write_json

_FILE = "best.json"


class BestValue:
    """The best value of a metric so far, in ``best.json`` of ``directory`` beside its step's files."""

    def __init__(self, directory: Path, metric: str) -> None:
        self.directory, self._metric = directory, metric
        self._sign = METRIC_SPECS[metric.removeprefix("eval/")].better
        known = read_object(directory / _FILE, metric=str, value=int | float)
        self._best: float = known["value"] if known.get("metric") == metric else -math.inf * self._sign

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """True if the metric improved; NaN never does."""
        return bool(self._sign * metrics.get(self._metric, math.nan) > self._sign * self._best)

    @contextmanager
    def replace(self, step: int, metrics: Mapping[str, float]) -> Iterator[Path]:
        """Yield an empty directory for the files of ``step``, which replaces the earlier one if the block succeeds."""
        value = metrics[self._metric]
        with whole_directory(self.directory) as writing:
            yield writing
            write_json(writing / _FILE, {"metric": self._metric, "value": value, "step": step})
        self._best = value
