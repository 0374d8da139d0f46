"""Everything a run needs before its first step: data, grader, model; and what may change when it is resumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.compose import ComposedConfig, to_yaml, validate_run
from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.config.steps import with_steps
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.files import write_atomically
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.checkpoint import Checkpoint, export_model, list_checkpoints
from coca_mindspeed.local.policy import Policy, choose_device, load_policy
from coca_mindspeed.local.progress import WarmUpProgress
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.tiny_model import write_tiny_model
from coca_mindspeed.local.trainer import Trainer
from coca_mindspeed.local.warm_up import warm_up

# A resumed run may log, save and evaluate differently; anything else would not be the same run.
_MAY_CHANGE = ("evaluation", "checkpoint", "logging")


@dataclass(frozen=True)
class Session:
    """A trainer, ready to run, and the checkpoint that it goes on from, if any."""

    trainer: Trainer
    resume_from: Checkpoint | None

    def close(self) -> None:
        """End the grader's processes; for ``contextlib.closing``."""
        self.trainer.grader.close()


def load_data(config: DataConfig) -> tuple[list[Record], list[Record]]:
    """Training and held-out records.

    Raises:
        DataError: a file cannot be read or holds no records.
    """
    if config.name == "arithmetic":
        return (
            arithmetic_records(config.train_size, "train", config.seed),
            arithmetic_records(config.evaluate_size, "evaluate", config.seed),
        )
    assert config.train is not None
    train = list(read_records(Path(config.train)))
    if not train:
        raise DataError(f"data.train={config.train}: holds no records")
    return train, [] if config.evaluate is None else list(read_records(Path(config.evaluate)))


def open_session(composed: ComposedConfig, output: Path, *, resume: bool, show_progress: bool = True) -> Session:
    """Load or make everything a run needs, in ``output``.

    Args:
        composed: the run's configuration; it is saved as ``config.yaml``.
        output: the run's directory.
        resume: go on from the newest checkpoint; without one, start from the beginning.
        show_progress: draw progress bars.

    Raises:
        ConfigError: the directory already holds a run (and ``resume`` is not set), or holds another one.
    """
    config = composed.run
    saved = output / "config.yaml"
    if saved.exists() and not resume:
        raise ConfigError(f"--output {output}: already holds a run; add --resume to go on with it, or choose another")
    if config.evaluation.interval and config.data.name == "records" and config.data.evaluate is None:
        raise ConfigError("evaluation.interval is set, but data.evaluate names no held-out records")
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    device = choose_device(config.trainer.device)
    train, evaluate = load_data(config.data)
    config = with_steps(config, len(train))
    if saved.exists():
        _refuse_another_run(config, saved)
    try:
        write_atomically(saved, to_yaml(config))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from error
    checkpoints = list_checkpoints(output / "checkpoints")
    newest = checkpoints[-1] if checkpoints else None
    policy = _load_or_make_policy(config, output, newest, train, device, show_progress)
    grader = build_grader(config.data.grader, config.data.grader_options)
    trainer = Trainer(config, policy, grader, train, evaluate, output, show_progress)
    return Session(trainer, newest)


def _load_or_make_policy(
    config: RunConfig,
    output: Path,
    newest: Checkpoint | None,
    train: Sequence[Record],
    device: torch.device,
    show_progress: bool,
) -> Policy:
    if newest is not None:
        return load_policy(newest.model, config.model, device, where="checkpoint")
    if config.model.path is not None:
        return load_policy(Path(config.model.path), config.model, device)
    return load_policy(
        warm_start(config, output, train, device, show_progress), config.model, device, where="warm start"
    )


def warm_start(
    config: RunConfig,
    output: Path,
    train: Sequence[Record],
    device: torch.device,
    show_progress: bool,
    symbols: str = "",
) -> Path:
    """The directory of the warmed-up tiny model, made if it is not there yet.

    Args:
        config: the run's.
        output: where it is made.
        train: what it is warmed up on.
        device: to warm it up on.
        show_progress: draw a progress bar.
        symbols: characters that the model's vocabulary has besides its own.
    """
    path = output / "warm_start"
    if not path.exists():
        untrained = output / "untrained"
        write_tiny_model(untrained, derived_seed(config.seed, "weights"), symbols)
        policy = load_policy(untrained, config.model, device, where="tiny model")
        with WarmUpProgress(config.warm_up.steps, show_progress) as progress:
            warm_up(policy, train, training_method(config.method.name), config.warm_up, config.seed, progress.advance)
        export_model(policy, path)
    return path


def _refuse_another_run(config: RunConfig, saved: Path) -> None:
    before = validate_run(yaml.safe_load(saved.read_text(encoding="utf-8")), (saved,)).model_dump(mode="json")
    now = config.model_dump(mode="json")
    for section, values in now.items():
        if section in _MAY_CHANGE or values == before[section]:
            continue
        if isinstance(values, dict):
            key = next(k for k in values if values[k] != before[section].get(k))
            found, expected, name = values[key], before[section].get(key), f"{section}.{key}"
        else:
            found, expected, name = values, before[section], section
        raise ConfigError(
            f"{saved}: the run to resume has {name}={expected!r}, found {found!r}; "
            f"only {', '.join(_MAY_CHANGE)} may change when a run is resumed"
        )
