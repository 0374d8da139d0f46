"""How many steps a stage has: ``trainer.steps``, or as many as ``data.epochs`` passes over the questions need."""

from pathlib import Path

from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.errors import DataError, Problem, raise_problems
from coca_mindspeed.utils.text_formats import numbered_lines


def steps_of_epochs(epochs: float, rows: int, prompts: int) -> int:
    """Whole steps of ``prompts`` questions in ``epochs`` passes over ``rows``; the remainder is dropped.

    Raises ConfigError if there is not even one.
    """
    steps = int(epochs * rows / prompts)
    if steps < 1:
        reason = f"{epochs:g} x {rows} questions are fewer than rollout.prompts={prompts}"
        fix = f"set it to {prompts / rows:.6g} or more"
        raise_problems([Problem("no-whole-step", "data.epochs", epochs, reason, fix)])
    return steps


def with_steps(config: RunConfig, rows: int) -> RunConfig:
    """The configuration with ``trainer.steps`` as ``data.epochs`` asks for; unchanged where that is null."""
    if config.data.epochs is None:
        return config
    steps = steps_of_epochs(config.data.epochs, rows, config.rollout.prompts)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


def training_rows(config: DataConfig) -> tuple[int | None, str]:
    """``(rows, where the number is from)``: of the embedded data, of the file, or as ``data.rows`` expects."""
    if config.name == "arithmetic":
        return config.train_size, "data.train_size"
    path = Path(str(config.train))
    if not path.exists():
        return config.rows, "data.rows, for the file is not here" if config.rows else "unknown"
    try:
        with path.open("rb") as file:
            return sum(line is None or bool(line.strip()) for _, line in numbered_lines(file)), str(path)
    except OSError as error:
        raise DataError(f"data.train={path}: cannot be read: {error.strerror}") from error
