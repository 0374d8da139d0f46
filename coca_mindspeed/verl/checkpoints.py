"""Checkpoints of a run on verl: what a resumed run must share with them, earlier rows of the log, and the best one.

verl truncates its log file at each start.  The rows before the checkpoint are moved to a hidden file before verl opens
its log, logged again once it is open, and then deleted.  If a process dies in between, the next start finds them in the
hidden file.

verl calls a ``trainer.checkpoint_callback_class`` after each checkpoint, before it validates the same step; our
trainers call ``on_validate`` then.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.config.checks import check_resumed_settings
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.run_marker import RunMarker, read_run_marker
from coca_mindspeed.config.values import fact_of, facts_of
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.scoring.best import BestValue
from coca_mindspeed.scoring.settings import stored_section
from coca_mindspeed.utils.files import file_sha256, write_atomically
from coca_mindspeed.utils.json_files import cut_back, read_steps
from coca_mindspeed.verl.settings import NAME, VerlSettings, verl_settings

_FACTS = facts_of(VerlSettings, above=f"{NAME}.")
BEST = "best"
#: verl's own file, which names the newest of a directory's checkpoints.
VERLS_NEWEST = "latest_checkpointed_iteration.txt"


def check_length(total_steps: int, steps_per_epoch: int, epochs: int) -> None:
    """Raise ``ConfigError`` for more steps than the epochs have.

    verl's loop would end without its last checkpoint and validation.
    """
    if total_steps > (reached := steps_per_epoch * epochs):
        reason = f"trainer.total_epochs={epochs} of {steps_per_epoch} steps each end after {reached}"
        fix = f"set trainer.total_epochs to {math.ceil(total_steps / steps_per_epoch)} or more"
        raise_problems([Problem("length", "trainer.total_training_steps", total_steps, reason, fix)])


def check_resume(
    directory: Path,
    settings: VerlSettings,
    total_steps: int,
    resumed_step: int,
    *,
    train_files: Iterable[str] = (),
    prompt: TrainedPrompt | None = None,
) -> None:
    """Raise ConfigError if the checkpoints are of another method, grading or data; then write the run's marker.

    ``directory`` is ``trainer.default_local_dir``; the stages of a method share ``total_steps``.  If ``resumed_step``
    is 0, the marker there is replaced, unless there are checkpoints, which the next start would take for this run's.
    """
    total = total_steps if len(settings.method.training_method.stages) > 1 else None
    # Of the files that are on this machine, by their place.
    files = {f"train_files.{number}": Path(file) for number, file in enumerate(train_files)}
    data = {key: {"sha256": file_sha256(file)} for key, file in files.items() if file.is_file()}
    stored = {NAME: settings.model_dump(mode="json"), "trainer": {"total_training_steps": total}}
    now = RunMarker(engine="verl", settings=stored, data=data, prompt=prompt)
    before = read_run_marker(directory, "verl")
    if before is not None and (resumed_step or (directory / VERLS_NEWEST).is_file()):
        section = stored_section(VerlSettings, before.settings.get(NAME) or {}, directory)
        check_resumed_settings(
            {**before.settings, NAME: section, "data": before.data or now.data},
            {**now.settings, "data": now.data},
            where=directory,
            fix="change trainer.default_local_dir, or remove the directory",
            may_change=lambda key: fact_of(_FACTS, key).resume != "same",
        )
    now.write(directory, resumed=resumed_step > 0)


def file_of_verls_log(project: str, experiment: str, environment: Mapping[str, str] | None = None) -> Path:
    """The path of verl's file logger, by the same rules as in verl (``trainer.project_name``, ``experiment_name``)."""
    environment = os.environ if environment is None else environment
    if (path := environment.get("VERL_FILE_LOGGER_PATH")) is not None:
        return Path(path)
    return Path(environment.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / project / f"{experiment}.jsonl"


class MetricsBeforeResume:
    """The rows of ``log`` up to ``step``, the step of the checkpoint; none for step 0, a new run."""

    def __init__(self, log: Path, step: int) -> None:
        """Copy the rows to the hidden file; raises ``DataError`` if the log is damaged elsewhere than at its end."""
        self._aside = log.with_name(f".{log.name}.earlier")
        if step == 0:
            self._aside.unlink(missing_ok=True)
        elif self._aside.exists():
            cut_back(self._aside, step)
        elif log.exists():
            cut_back(log, step)
            write_atomically(self._aside, log.read_bytes())

    def replay(self, log: Callable[[Mapping[str, Any], int], None]) -> None:
        """Pass each row's metrics and step to ``log``, once."""
        if self._aside.exists():
            for row in read_steps(self._aside):
                log(row["data"], row["step"])
            self._aside.unlink()


class BestCheckpoint:
    """Keeps the checkpoint with the best ``coca.best_metric`` in ``best/`` of ``trainer.default_local_dir``.

    ``best/`` holds ``global_step_N``, whose files are hard links (copies where the file system has none), and
    ``best.json``.  Only steps that save and validate take part.
    """

    def __init__(self, config: Any = None) -> None:
        """Read the best value so far, if it is of the same metric; ``config`` is verl's whole configuration."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        directory = Path(plain["trainer"]["default_local_dir"]) / BEST
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
