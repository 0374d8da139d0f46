"""Static plan of a cluster run: layout, iterations, memory, problems."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coca_mindspeed.config.checks import Problem
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.steps import steps_of_epochs, training_rows
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.checks import layout_problems, run_problems
from coca_mindspeed.mindspeed.memory_estimate import MemoryEstimate, estimate_memory
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig, resolve_config
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plan of a run; ``memory`` is None on the CPU shim and if the layout has problems.

    Attributes:
        rows: training questions; None if unknown.
        rows_from: origin of that number.
        iterations: of each stage; None if the number of questions is unknown.
    """

    resolved: ResolvedConfig
    memory: MemoryEstimate | None
    rows: int | None
    rows_from: str
    iterations: int | None
    problems: tuple[Problem, ...] = ()


def make_plan(run: RunConfig) -> ClusterPlan:
    """Plan a run for Ascend.

    Raises:
        ConfigError: the run is not for a cluster, or a key has a value of the wrong type.
        DataError: the training file exists and cannot be read.
    """
    resolved = resolve_config(run)
    fits_layout = run.hardware.platform == "npu" and not any(layout_problems(resolved))
    memory = estimate_memory(resolved) if fits_layout else None
    rows, rows_from = training_rows(run.data)
    iterations: int | None = run.trainer.steps
    problems = []
    if run.data.epochs is not None:
        try:
            iterations = None if rows is None else steps_of_epochs(run.data.epochs, rows, run.rollout.prompts)
        except ConfigError as error:
            iterations, problems = None, error.problems
    plan = ClusterPlan(resolved, memory, rows, rows_from, iterations)
    # The number of iterations is unknown to the hooks' conditions; any number does.
    values = partial(mindspeed_values, run, replace(plan, iterations=iterations or 1), StageFiles(Path("runs")))
    return replace(plan, problems=(*problems, *run_problems(run, resolved, memory, values)))
