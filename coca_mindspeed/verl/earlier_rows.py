"""The log of verl's file logger across starts: verl empties it at each, and a resumed run has more to say than that.

What it says up to the checkpoint is set aside before verl opens it, logged again as soon as it is open, and only then
let go.  A process that dies in between leaves what was set aside, and the next start takes that in place of the log.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.jsonl import cut_back, read_steps


def file_of_verls_log(project: str, experiment: str, environment: Mapping[str, str] | None = None) -> Path:
    """Where verl's file logger writes, as it finds that out itself.

    Args:
        project: ``trainer.project_name``.
        experiment: ``trainer.experiment_name``.
        environment: of the process; its own by default.
    """
    environment = os.environ if environment is None else environment
    if (path := environment.get("VERL_FILE_LOGGER_PATH")) is not None:
        return Path(path)
    return Path(environment.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / project / f"{experiment}.jsonl"


class EarlierRows:
    """The rows of a log up to the step that a run goes on from."""

    def __init__(self, log: Path, step: int) -> None:
        """Set them aside.

        Args:
            log: verl's, not opened yet.
            step: of the checkpoint; 0 where the run starts afresh, and then there are none.

        Raises:
            DataError: the log is damaged elsewhere than at its end.
        """
        self._aside = log.with_name(f".{log.name}.earlier")
        if step == 0:
            self._aside.unlink(missing_ok=True)
            return
        if self._aside.exists():
            cut_back(self._aside, step)
        elif log.exists():
            cut_back(log, step)
            write_atomically(self._aside, log.read_bytes())

    def log_again(self, log: Callable[[Mapping[str, Any], int], None]) -> None:
        """Hand them to the open log, once.

        Args:
            log: takes a step's metrics and the step.
        """
        if not self._aside.exists():
            return
        for row in read_steps(self._aside):
            log(row["data"], row["step"])
        self._aside.unlink()
