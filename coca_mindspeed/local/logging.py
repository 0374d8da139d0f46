"""Run logs: JSON Lines always; TensorBoard, Weights & Biases and SwanLab on request.

``metrics.jsonl`` depends on the seed only; wall-clock times go to ``timing.jsonl``.  A resumed run truncates both to
its checkpoint.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.config.schema import LoggingConfig
from coca_mindspeed.utils.json_files import cut_back, replace_nonfinite, to_json_line, write_json_lines
from coca_mindspeed.utils.packages import require

Scalars = Mapping[str, float]


class LogError(Exception):
    """A log cannot be written, usually because the disk is full."""


class RunLog:
    def __init__(
        self, directory: Path, config: LoggingConfig, settings: Mapping[str, Any], run_id: str, resume_step: int = 0
    ) -> None:
        """Open the logs; rows of steps after ``resume_step`` are removed, 0 starts anew.

        ``settings`` is the run's configuration, and ``run_id`` 32 hexadecimal digits, the same when the run is resumed.
        """
        self._directory = directory
        self._metrics, self._timing = directory / "metrics.jsonl", directory / "timing.jsonl"
        self._sinks: list[Callable[[int, Scalars], None]] = []
        self._closers: list[Callable[[], None]] = []
        self.tensorboard: Any = None
        for path in (self._metrics, self._timing):
            cut_back(path, resume_step or -1)  # the row of step 0 is written again with that of step 1
        samples = directory / "samples"
        for path in samples.glob("step_*.jsonl") if samples.is_dir() else ():
            if int(path.stem.removeprefix("step_")) > resume_step:
                path.unlink()
        if config.tensorboard:
            self._open_tensorboard(resume_step)
        if config.wandb is not None:
            import wandb

            where = {"dir": str(directory), "id": run_id, "name": directory.resolve().name, "resume": "allow"}
            run = wandb.init(project=config.wandb, config=dict(settings), **where)
            self._sinks.append(lambda step, scalars: run.log(dict(scalars), step=step))
            self._closers.append(run.finish)
        if config.swanlab is not None:
            import swanlab

            logs = str(directory / "swanlab")
            # Its older releases take ids of exactly 21 characters.
            of_run = {"id": run_id[:21], "experiment_name": directory.resolve().name, "resume": "allow"}
            swanlab.init(project=config.swanlab, logdir=logs, config=dict(settings), **of_run)
            self._sinks.append(lambda step, scalars: swanlab.log(dict(scalars), step=step))
            self._closers.append(swanlab.finish)

    def write(self, step: int, metrics: Scalars, timing: Scalars) -> None:
        """Append one step's row to each log; NaN is null in JSON and omitted elsewhere.  Raises LogError."""
        for path, row in ((self._metrics, metrics), (self._timing, timing)):
            with _log_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(to_json_line({"step": step, **replace_nonfinite(row)}))
        finite = {name: value for name, value in {**metrics, **timing}.items() if math.isfinite(value)}
        for sink in self._sinks:
            sink(step, finite)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rollout samples of one step to ``samples/step_000010.jsonl``.  Raises LogError."""
        path = self._directory / "samples" / f"step_{step:06d}.jsonl"
        with _log_errors(path):
            write_json_lines(path, rows)

    def close(self) -> None:
        for close in self._closers:
            close()

    def _open_tensorboard(self, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = self._directory / "tensorboard"
        # A run that died before its first checkpoint starts again, beside the curves of its first try.
        purge = (resume_step and resume_step + 1) if directory.exists() else None
        writer: Any = SummaryWriter(str(directory), purge_step=purge)
        self.tensorboard = writer

        def write(step: int, scalars: Scalars) -> None:
            with _log_errors(directory):
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)

        self._sinks.append(write)
        self._closers.append(writer.close)


@contextlib.contextmanager
def _log_errors(path: Path) -> Iterator[None]:
    """Raise LogError with the file's name, which the OSError of a full disk lacks."""
    try:
        yield
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror or error}") from error


def require_loggers(config: LoggingConfig) -> None:
    """Raise ``MissingDependencyError`` for a configured logger that is not installed."""
    for package in ("tensorboard", "wandb", "swanlab"):
        if getattr(config, package):
            require(package, purpose=f"logging.{package}")
