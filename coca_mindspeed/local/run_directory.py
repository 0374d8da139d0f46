"""The output directory of a run: its marker, its lock, and which settings may change when it is resumed.

The directory is locked and inspected before anything else is read.  The marker (:mod:`.config.run_marker`) is written
after all checks but the sampled responses, so a start that fails before leaves nothing behind.  This module does not
import torch.
"""

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coca_mindspeed.config.checks import check_resumed_settings
from coca_mindspeed.config.compose import to_yaml, validate_config
from coca_mindspeed.config.prompt_form import PROMPT_FILE
from coca_mindspeed.config.run_marker import RunMarker, is_run_of, read_run_marker
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import fact_of, facts_of
from coca_mindspeed.errors import ConfigError, Problem, raise_problems
from coca_mindspeed.local.model_files import FLOAT32, TINY_MODEL, trained_bytes, weight_shapes
from coca_mindspeed.local.schedule import learning_rate
from coca_mindspeed.utils.directories import (
    MARKER,
    PROGRESS,
    check_writable,
    lock_run,
    nearby_runs,
    nearest_directory,
    remove_entries,
)
from coca_mindspeed.utils.files import is_hub_id, write_atomically
from coca_mindspeed.utils.text_formats import differences

_MIB = 2**20
_CHECKPOINT = re.compile(r"step_(\d{6,})")
WARMED_UP = "warm_start"  # the model after the warm-up
BEST_MODEL = "best_model"  # by checkpoint.best
_UNFINISHED = ((".", ".writing"), (".replaced_", ""))  # names of a model while it is replaced
_SETTINGS = "config.yaml"
#: The files of a run, one line each; ``make docs`` writes them into docs/training.md.
FILES = {
    _SETTINGS: "the resolved configuration, for `train` and `check`",
    "untrained": "the built-in tiny model before its warm-up",
    WARMED_UP: "the model after the format warm-up",
    "warm_up": "the last checkpoint of a warm-up that is not finished",
    "checkpoints": "`step_NNNNNN/`: weights, moments and their step, to resume from",
    "model": "the trained model, a Hugging Face directory (float32, adapters merged)",
    BEST_MODEL: "the model of the best evaluation, with `best.json` (`checkpoint.best`)",
    "metrics.jsonl": "one row per step: [metrics](troubleshooting.md#metrics-of-a-step), no wall-clock times",
    "timing.jsonl": "one row per step: seconds of its parts",
    "samples": "`step_NNNNNN.jsonl`: sampled responses with verdict, reason and advantages",
    "tensorboard": "events of `logging.tensorboard`",
    "wandb": "files of `logging.wandb`",
    "swanlab": "files of `logging.swanlab`",
    "predictions_before.jsonl": "the held-out questions with the responses before the training",
    "predictions_after.jsonl": "the same after the training",
    "evaluations": "`step_NNNNNN.jsonl`: the same during the training (`evaluation.interval`)",
    "summary.json": "metrics of both, counts of questions, seconds",
    "seconds.json": "wall time of warm-up, evaluations and training, summed over resumptions",
    PROGRESS: "progress of a phase before the first step, read by `watch`",
    "report.md": "the report as Markdown",
    "report.html": "the report with its pictures in one file",
    "reliability.png": "right answers at each stated confidence",
    "training_curves.png": "rewards, ECE and length over the steps",
    "gap.png": "stated confidence minus accuracy: first sight, repeated, held out",
    "figures": "pictures of an earlier release's report",
}
# Must not exist before a run, and are removed when a run without steps starts again.
ENTRIES = (
    *FILES,
    PROMPT_FILE,  # of an earlier release
    *(f"{name}{model}{end}" for model in ("model", WARMED_UP, BEST_MODEL) for name, end in _UNFINISHED),
)
_FACTS = facts_of(RunConfig)
_MAY_CHANGE = ("free", "length", "memory")
_RESUMES_FROM = (0, 3)  # the release whose rewards are today's


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, after ``step`` updates."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        """A Hugging Face directory; absent if adapters are trained."""
        return self.path / "model"

    @property
    def adapters(self) -> Path:
        """Adapters in peft's format, if they are trained."""
        return self.path / "adapters"


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    matches = [(path, _CHECKPOINT.fullmatch(path.name)) for path in directory.glob("step_*")]
    found = [Checkpoint(path, int(match[1])) for path, match in matches if match]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


@dataclass(frozen=True)
class RunState:
    """The state of a run's output directory."""

    path: Path
    # Of the run that is there; without settings, there is none.
    marker: RunMarker = field(default_factory=lambda: RunMarker(engine="local", settings={}))
    newest: Checkpoint | None = None  # the checkpoint to continue from; None: the run begins
    has_steps: bool = False  # the run that is there finished a step
    resume: bool = False  # the run that is there goes on

    @cached_property
    def saved(self) -> RunConfig:
        """The configuration of the run that is there; raises ConfigError if it cannot be used."""
        if not self.marker.settings:
            raise ConfigError(f"{self.path}: the settings of the run to resume are not there")
        return validate_config(self.marker.settings, self.path)


@contextmanager
def open_run_directory(path: Path, *, resume: bool) -> Iterator[RunState]:
    """Lock an output directory, repair what a killed process left in it, and inspect it; nothing else is changed.

    A run that never finished a step is started again, with other settings too.  Raises ConfigError: not a directory,
    cannot be written, used by another process, holds other files, holds a run without ``resume``, or none to resume.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path}: is a file; a run needs a directory")
    check_writable(path)
    with lock_run(path):
        if is_run_of(path, "local"):
            remove_leftovers(path)
        yield _inspect(path, resume)


def _inspect(path: Path, resume: bool) -> RunState:
    marker = read_run_marker(path, "local") if is_run_of(path, "local") else None
    if marker is None:
        if others := [name for name in (*ENTRIES, MARKER) if (path / name).exists()]:
            reason = f"holds {others[0]!r}, and is not the directory of a run"
            raise_problems([Problem("not-a-run", "--output", path, reason, "choose a new or empty directory")])
        if resume:
            nearby = nearby_runs(path, lambda other: is_run_of(other, "local"))
            fix = f"correct --output, or leave --resume out to start a run{nearby}"
            raise_problems([Problem("no-run", "--output", path, "holds no run to resume", fix)])
        return RunState(path)
    checkpoints = list_checkpoints(path / "checkpoints")
    metrics = path / "metrics.jsonl"
    has_steps = bool(checkpoints) or (metrics.exists() and metrics.stat().st_size > 0)
    if has_steps and not resume:
        raise ConfigError(
            f"--output {path}: already holds a run; add --resume to continue it, remove it, or choose another directory"
        )
    if has_steps:
        _check_release(path, marker.version)
    return RunState(path, marker, checkpoints[-1] if checkpoints else None, has_steps, resume)


def _check_release(path: Path, release: str) -> None:
    """Refuse to continue a run whose release trained by other rewards."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or tuple(map(int, numbers.groups())) < _RESUMES_FROM:
        reason = f"holds a run of coca-mindspeed {release}, which trained by other rewards and draws"
        reason += "; continue it with that release, or start a new run"
        raise_problems([Problem("release", "--output", path, reason)])


# Temporary names of local/checkpoint.py.
_LEFTOVER = re.compile(r"\.removing_\d{6,}|\.(?:model|warm_start|best_model|step_\d{6,})\.writing")
_REPLACED = re.compile(r"\.replaced_(model|warm_start|best_model|step_\d{6,})")
_HALF_A_FILE = re.compile(r"\.[\w-]+\.(?:jsonl?|yaml|md|html|png)\.[a-z0-9_]{8}")


def remove_leftovers(output: Path) -> None:
    """Remove our partial files of a killed process; restore a model that was being replaced."""
    for directory in (output, *(output / name for name in ("checkpoints", "samples", "warm_up"))):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if (match := _REPLACED.fullmatch(path.name)) and not (directory / match[1]).exists():
                path.rename(directory / match[1])
            elif match or _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
            elif _HALF_A_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()


def check_space(config: RunConfig, state: RunState, model: Path | None) -> None:
    """Refuse a run whose checkpoints and models do not fit on the disk; ``model`` is its directory (None: built-in)."""
    shapes = TINY_MODEL if model is None else weight_shapes(model)
    there = len(list_checkpoints(state.path / "checkpoints"))
    done, total = state.newest.step if state.newest else 0, config.total_steps
    interval = config.checkpoint.interval if config.checkpoint.minutes is None else 1
    written = -(-total // interval) - done // interval if interval else 1
    # A new checkpoint is written before the oldest is removed.
    more = min(written, max(0, config.checkpoint.keep + 1 - there)) if done < total else 0
    size = sum(trained_bytes(shapes, config.model.lora, config.optimizer.name))
    # The trained model, the best one and its successor, and the export of a warm-up that is not done.
    warm_up = config.warm_up.records is not None and not (state.path / WARMED_UP).exists()
    models = 1 + 2 * (config.checkpoint.best is not None) + warm_up
    exported = FLOAT32 * sum(map(math.prod, shapes.values()))
    free, needed = shutil.disk_usage(nearest_directory(state.path)).free, more * size + models * exported
    if free < needed:
        reason = (
            f"{free / _MIB:,.0f} MiB are free, about {needed / _MIB:,.0f} MiB are needed for {more} more checkpoint(s) "
            f"of {size / _MIB:,.0f} MiB at once and {models} model(s) of {exported / _MIB:,.0f} MiB"
        )
        fix = "make room, choose a directory on another disk, or keep fewer checkpoints (checkpoint.keep=1)"
        raise_problems([Problem("disk", "--output", state.path, reason, fix)])


def write_settings(state: RunState, config: RunConfig, marker: RunMarker) -> None:
    """Write marker and settings of a run that begins or goes on; files of another one without steps are removed."""
    path, resumed = state.path, bool(state.marker.settings)
    try:
        if resumed and not state.has_steps and not _creates_the_same(state, config, marker):
            remove_entries(path, "run", ENTRIES)
            resumed = False
        marker.write(path, resumed=resumed)
        write_atomically(path / _SETTINGS, to_yaml(config))
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error


def _creates_the_same(state: RunState, config: RunConfig, marker: RunMarker) -> bool:
    """True if an unfinished start can be reused: same settings, same data."""
    if state.marker.data != marker.data:
        return False
    changed = differences(state.saved.model_dump(mode="json"), config.model_dump(mode="json"))
    return {fact_of(_FACTS, key).resume for key, _, _ in changed} <= {"free", "memory"}


def check_same_settings(state: RunState, config: RunConfig) -> None:
    """Raise ConfigError for settings, but the length, that would have changed the steps already taken."""
    free = {key for key, facts in _FACTS.items() if facts.resume in _MAY_CHANGE}
    named = sorted(key for key in free if key.rpartition(".")[0] not in free)
    check_resumed_settings(
        state.saved.model_dump(mode="json"),
        config.model_dump(mode="json"),
        where=state.path,
        fix=f"only {', '.join(named)} may change when a run is resumed",
        may_change=lambda key: fact_of(_FACTS, key).resume in _MAY_CHANGE,
    )


def check_same_data(state: RunState, config: RunConfig, data: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a length or records that would have changed the steps already taken."""
    _check_same_length(state, config)
    before = {name: state.marker.data.get(name) for name in data}
    fix = "restore the file, or start a new run"
    check_resumed_settings({"data": before}, {"data": data}, where=state.path, fix=fix)


def check_same_prompt(state: RunState, prompt_sha256: str) -> None:
    """Raise ConfigError if the first training question's prompt is rendered differently from the run to resume."""
    before = {"first_prompt_sha256": state.marker.first_prompt_sha256 or prompt_sha256}
    fix = "restore the tokenizer's files and the release of transformers, or start a new run"
    check_resumed_settings(before, {"first_prompt_sha256": prompt_sha256}, where=state.path, fix=fix)


def starting_model(config: RunConfig, state: RunState) -> tuple[Path | None, str]:
    """The model that the run starts from (None: the built-in one), and its name in messages."""
    if state.newest is not None and config.model.lora.rank is None:
        return state.newest.model, "checkpoint"
    if state.newest is not None and (config.model.path is None or config.warm_up.records is not None):
        return state.path / WARMED_UP, "warm start"  # the adapters' base
    return None if config.model.path is None else Path(config.model.path), "model.path"


def with_model(config: RunConfig, **changes: str) -> RunConfig:
    """The configuration with other keys of ``model``."""
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def with_stored(config: RunConfig, state: RunState) -> RunConfig:
    """The configuration with the run's own choices: compute dtype, date of the prompts, copy of a hub's model."""
    if not state.marker.settings:
        return config
    saved, name, changes = state.saved.model, config.model.path or "", {}
    if saved.path and is_hub_id(name) and f"models--{name.replace('/', '--')}" in Path(saved.path).parts:
        changes["path"] = saved.path
    if config.model.compute_dtype == "auto":
        changes["compute_dtype"] = saved.compute_dtype
    if config.model.prompt_date is None and saved.prompt_date is not None:
        changes["prompt_date"] = saved.prompt_date
    return with_model(config, **changes)


def _check_same_length(state: RunState, config: RunConfig) -> None:
    """Refuse another number of steps if a step already taken had another stage or learning rate."""
    before, now = state.saved.trainer.steps, config.trainer.steps
    for step in range(state.newest.step if state.newest else 0):
        was, would = ((step // n, learning_rate(config.optimizer, step % n, n)) for n in (before, now))
        if was != would:
            raise ConfigError(
                f"trainer.steps: the run to resume has {before}, found {now}, but step {step + 1} was taken in stage "
                f"{was[0]} at lr {was[1]:.6g}, and would be in stage {would[0]} at lr {would[1]:.6g}; a run can only "
                "be extended in its first stage and with optimizer.schedule=constant"
            )
