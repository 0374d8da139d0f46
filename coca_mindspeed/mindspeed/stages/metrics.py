"""Metrics in a form that MindSpeed-RL can average over batches and nodes.

MindSpeed-RL averages every list of values under a key.  A ratio is reported as numerator and denominator, which are
averaged separately and divided by :func:`divide_ratios`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.evaluation.predictions import VALIDATIONS, validation_files
from coca_mindspeed.mindspeed.stages.dock import read_rows
from coca_mindspeed.mindspeed.start.process import METRICS, VALIDATION, CocaSettings
from coca_mindspeed.scoring.metrics import WeightedMean
from coca_mindspeed.scoring.settings import dump_is_due
from coca_mindspeed.utils.json_files import cut_back, replace_nonfinite, to_json_line, write_json_lines

_NUMERATOR, _DENOMINATOR = "/numerator", "/denominator"
_SAMPLES, _OF_ITERATION = "samples", "iteration_"


class IterationRow(dict[str, Any]):
    """The metrics of one iteration, by name."""

    is_logged = False


def ratio(name: str, numerator: float, denominator: float) -> dict[str, float]:
    """A ratio in two entries, for :func:`divide_ratios`."""
    return {name + _NUMERATOR: numerator, name + _DENOMINATOR: denominator}


def divide_ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the ratios; one with denominator 0 is left out."""
    finished = {k: v for k, v in metrics.items() if not k.endswith((_NUMERATOR, _DENOMINATOR))}
    for key, numerator in metrics.items():
        if key.endswith(_NUMERATOR):
            name = key.removesuffix(_NUMERATOR)
            if denominator := metrics[name + _DENOMINATOR]:
                finished[name] = numerator / denominator
    return finished


def as_ratios(metrics: Mapping[str, WeightedMean]) -> dict[str, float]:
    """Means as ratios, so that several batches give the mean over all of their entries."""
    ratios: dict[str, float] = {}
    for name, mean in metrics.items():
        ratios |= ratio(name, mean.value * mean.weight if mean.weight else 0.0, mean.weight)
    return ratios


class SampleWriter:
    """Writes ``output_dir/samples/iteration_000010.jsonl``: some prompts with all their responses."""

    def __init__(self, settings: CocaSettings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer.tokenizer

    def prompts_wanted(self, iteration: int) -> int:
        """How many prompts to dump in this iteration (from 1)."""
        return self._settings.samples_prompts if dump_is_due(self._settings.samples_interval, iteration) else 0

    def write(self, iteration: int, rows: Sequence[Mapping[str, Any]], dock: Any) -> None:
        """Write the advantage task's rows with their prompts and responses, if there are any."""
        if not rows or self._settings.output_dir is None:
            return
        indexes = [row["index"] for row in rows]
        texts = read_rows(dock, ["prompts", "responses"], indexes, stall_timeout=self._settings.stall_timeout)
        decoded = {name: [self._tokenizer.decode(ids.tolist()) for ids in texts[name]] for name in texts}
        write_json_lines(
            self._settings.output_dir / _SAMPLES / f"{_OF_ITERATION}{iteration:06d}.jsonl",
            (
                {"step": iteration, "prompt": prompt, "response": response, **row}
                for row, prompt, response in zip(rows, decoded["prompts"], decoded["responses"], strict=True)
            ),
        )


def cut_logs(output: Path, iteration: int) -> None:
    """Remove logged iterations after ``iteration``, from which the run continues; 0 starts anew."""
    last = iteration or -1  # each start validates the initial weights again
    for name in (METRICS, VALIDATION):
        cut_back(output / name, last)
    samples = (output / _SAMPLES).glob(f"{_OF_ITERATION}*.jsonl")
    written = [(int(path.stem.removeprefix(_OF_ITERATION)), path) for path in samples]
    for step, path in [*written, *validation_files(output / VALIDATIONS).items()]:
        if step > last:
            path.unlink()


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object to a log of this process; NaN and infinity become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json_line(replace_nonfinite(row)))
