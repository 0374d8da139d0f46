"""Runs: a label, predictions, and training metrics if there are any.  Reports compare runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, gradable, read_predictions
from coca_mindspeed.utils.json_files import read_steps
from coca_mindspeed.utils.text_formats import YamlError, read_yaml


@dataclass(frozen=True, slots=True)
class Run:
    """One row of a report's tables.

    Attributes:
        label: unique within a report.
        predictions: of one method and model; may be empty while the run is training.
        training: the objects of metrics.jsonl.
        method: as the predictions state it, or None.
    """

    label: str
    predictions: Sequence[Prediction]
    training: Sequence[Mapping[str, Any]] = field(default=())
    method: str | None = None

    def by_dataset(self) -> dict[str, list[Prediction]]:
        """Return the gradable predictions of each data set, data sets in order of appearance."""
        groups: dict[str, list[Prediction]] = {prediction.dataset: [] for prediction in self.predictions}
        for prediction in gradable(self.predictions):
            groups[prediction.dataset].append(prediction)
        return groups

    def ungradable(self) -> dict[str, int]:
        """Return data set -> number of ungradable answers, for the data sets that have any."""
        return dict(Counter(prediction.dataset for prediction in self.predictions if prediction.correct is None))


def split_runs(predictions: Sequence[Prediction], name: str) -> list[Run]:
    """Return a run for each (model, method), labelled by them, or by ``name`` where both are unknown."""
    groups: dict[tuple[str | None, str | None], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.model, prediction.method), []).append(prediction)
    return [
        Run(" ".join(filter(None, (model, method))) or name, rows, method=method)
        for (model, method), rows in groups.items()
    ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of prediction files and of run directories (``predictions*.jsonl``, ``metrics.jsonl``).

    A file named ``predictions.jsonl`` is labelled by its directory; ``predictions_after.jsonl`` adds ``after``.

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
        found = []
        for file in files:
            label = file_label(file, path)
            own = split_runs(read_named(file), label)
            found += own if len(own) > 1 else [replace(own[0], label=label)]
        if training and len(found) == 1:
            found = [replace(found[0], training=training)]
        elif training:
            # With predictions before and after training, the curves belong to neither.
            found.append(Run(path.resolve().name, (), training))
        runs += found
    return unique_labels(runs)


def prediction_files(directory: Path) -> list[Path]:
    """Return the prediction files of a run directory, those from before training first."""
    return sorted(directory.glob("predictions*.jsonl"), key=lambda file: (not file.stem.endswith("before"), file.name))


def read_named(file: Path, **how: Any) -> list[Prediction]:
    """Read a file; predictions after training that name no method get the one in the run's ``config.yaml``.

    ``how`` are arguments of :func:`~coca_mindspeed.evaluation.predictions.read_predictions`.
    """
    predictions = read_predictions(file, **how)
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
    """Number the runs that share a label."""
    total, seen, result = Counter(run.label for run in runs), Counter[str](), []
    for run in runs:
        seen[run.label] += 1
        result.append(run if total[run.label] == 1 else replace(run, label=f"{run.label} #{seen[run.label]}"))
    return result


def file_label(file: Path, path: Path) -> str:
    """Return the label of a prediction file; ``path`` is the file, or the run directory that holds it."""
    if not path.is_dir():
        return file.stem if file.stem != "predictions" else file.resolve().parent.name
    suffix = file.stem.removeprefix("predictions").strip("_-. ")
    return f"{path.resolve().name} {suffix}".strip()
