"""Runs: what a report compares.  A run is a label, its predictions, and its training metrics where it has any."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, gradable, read_predictions
from coca_mindspeed.utils.jsonl import read_steps
from coca_mindspeed.utils.text_formats import YamlError, read_yaml


@dataclass(frozen=True, slots=True)
class Run:
    """One line of a report's tables.

    Attributes:
        label: unique within a report.
        predictions: of one method and model; may be empty for a run that is still training.
        training: the objects of metrics.jsonl.
        method: as the predictions say it, or None.
    """

    label: str
    predictions: Sequence[Prediction]
    training: Sequence[Mapping[str, Any]] = field(default=())
    method: str | None = None

    def by_dataset(self) -> dict[str, list[Prediction]]:
        """The gradable predictions of each data set, data sets in order of appearance."""
        groups: dict[str, list[Prediction]] = {prediction.dataset: [] for prediction in self.predictions}
        for prediction in gradable(self.predictions):
            groups[prediction.dataset].append(prediction)
        return groups

    def ungradable(self) -> dict[str, int]:
        """Data set -> how many of its answers could not be graded; data sets without any are left out."""
        return dict(Counter(prediction.dataset for prediction in self.predictions if prediction.correct is None))


def split_runs(predictions: Sequence[Prediction], name: str) -> list[Run]:
    """A run for each (model, method) of a file, labelled by them; a lone one is called ``name``."""
    groups: dict[tuple[str | None, str | None], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.model, prediction.method), []).append(prediction)
    if len(groups) == 1:
        [(_, method)] = groups
        return [Run(name, predictions, method=method)]
    return [
        Run(" ".join(filter(None, (model, method))) or name, rows, method=method)
        for (model, method), rows in groups.items()
    ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs of prediction files and of run directories (``predictions*.jsonl``, ``metrics.jsonl``).

    A file named ``predictions.jsonl`` is called after its directory, ``predictions_after.jsonl`` that and ``after``.

    Raises:
        DataError: a path holds neither predictions nor metrics.
    """
    runs: list[Run] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: does not exist; expected a predictions file or a run directory")
        files = prediction_files(path) if path.is_dir() else [path]
        metrics = path / "metrics.jsonl"
        training = read_steps(metrics) if path.is_dir() and metrics.exists() else []
        if not files and not training:
            raise DataError(f"{path}: holds neither predictions*.jsonl nor metrics.jsonl")
        found = [run for file in files for run in split_runs(read_named(file), file_label(file, path))]
        if training and len(found) == 1:
            found = [replace(found[0], training=training)]
        elif training:
            # Predictions before and after a training: its curves belong to neither.
            found.append(Run(path.resolve().name, (), training))
        runs += found
    return unique_labels(runs)


def prediction_files(directory: Path) -> list[Path]:
    """The prediction files of a run directory, those from before its training first."""
    return sorted(directory.glob("predictions*.jsonl"), key=_before_first)


def read_named(file: Path) -> list[Prediction]:
    """A file's predictions; those of a finished training that name no method have the one in its ``config.yaml``."""
    predictions = read_predictions(file)
    config = file.parent / "config.yaml"
    if not file.stem.endswith("after") or not config.is_file():
        return predictions
    try:
        trained = read_yaml(config)["method"]["name"]
    except (KeyError, TypeError, YamlError) as error:
        raise DataError(
            f"{config}: expected the configuration of a run with method.name; found none: {error}"
        ) from error
    return [replace(p, method=str(trained)) if p.method is None else p for p in predictions]


def unique_labels(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of one label numbered."""
    return [_unique(run, index, runs) for index, run in enumerate(runs)]


def _before_first(file: Path) -> tuple[bool, str]:
    return not file.stem.endswith("before"), file.name


def file_label(file: Path, path: Path) -> str:
    """What the predictions of a file are called; ``path`` is the file, or the run directory that it lies in."""
    if not path.is_dir():
        return file.stem if file.stem != "predictions" else file.resolve().parent.name
    suffix = file.stem.removeprefix("predictions").strip("_-. ")
    return f"{path.resolve().name} {suffix}".strip()


def _unique(run: Run, index: int, runs: Sequence[Run]) -> Run:
    same = [i for i, other in enumerate(runs) if other.label == run.label]
    if len(same) == 1:
        return run
    return replace(run, label=f"{run.label} #{same.index(index) + 1}")
