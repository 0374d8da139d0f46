"""Resuming a run on verl: the same method and grading, a length that its epochs reach, and earlier rows of the log.

verl truncates its log file at each start.  The rows before the checkpoint are moved to a hidden file before verl opens
its log, logged again once it is open, and then deleted.  If a process dies in between, the next start finds them in the
hidden file.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.config import checks
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.json_files import cut_back, read_steps, write_json
from coca_mindspeed.verl.settings import VerlSettings

FILE = "coca.json"
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


def check_resume(directory: Path, settings: VerlSettings, total_steps: int, resumed_step: int) -> None:
    """Raise ConfigError if the checkpoints have another method or grading; then store both beside them.

    ``directory`` is ``trainer.default_local_dir``; the stages of a method share ``total_steps``.  If ``resumed_step``
    is 0, the file is replaced, unless there are checkpoints, which the next start would take for this run's.
    """
    grading = settings.model_dump(mode="json", include={"grader", "grading", "require_evaluated"})
    ours: dict[str, Any] = {**settings.method.model_dump(mode="json"), **grading}
    if len(settings.method.training_method.stages) > 1:
        ours["total_training_steps"] = total_steps
    path = directory / FILE
    if path.is_file() and (resumed_step or (directory / VERLS_NEWEST).is_file()):
        theirs = json.loads(path.read_text(encoding="utf-8"))
        fix = "change trainer.default_local_dir, or remove the directory"
        checks.check_resumed_settings(theirs, ours, where=path, fix=fix)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, ours)


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
