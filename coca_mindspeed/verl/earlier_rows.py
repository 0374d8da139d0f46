"""Rows of verl's log file before the checkpoint: verl truncates the file at each start, a resumed run restores them.

They are moved to a hidden file before verl opens its log, logged again once it is open, and then deleted.  If a process
dies in between, the next start finds them in the hidden file.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.utils.files import cut_back, read_steps, write_atomically


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
