"""Static plan of a cluster run: layout, iterations, time, memory, problems.

The time is an estimate that was not measured on an NPU.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.config.checks import steps_of_epochs, training_rows
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, DataError, Problem
from coca_mindspeed.mindspeed.checks import layout_problems, run_problems
from coca_mindspeed.mindspeed.memory_estimate import MemoryEstimate, estimate_memory
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig, resolve_config
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, written_keys
from coca_mindspeed.utils.files import read_json_lines

_SECONDS_PER_DAY = 86_400


class Rates(NamedTuple):
    """Assumptions of the time estimate.

    Attributes:
        tokens_per_response: mean tokens of a prompt with its response; an assumption.
        tokens_per_second: of prompts and responses, that an NPU trains on, all stages together. MindSpeed-RL 2.3.0
            publishes (docs/algorithms/grpo.md) 220 for a card of an Atlas A3, which is two NPUs: Qwen2.5-7B, 32 prompts
            x 8 responses, 2,048 + 2,048 tokens; the figure for 32B is the same.
    """

    tokens_per_response: float = 750.0
    tokens_per_second: float = 110.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plan of a run; ``memory`` is None on the CPU shim and if the layout has problems.

    ``rows`` is the number of training questions, ``rows_from`` its origin, ``iterations`` that of each stage; None if
    unknown.
    """

    resolved: ResolvedConfig
    memory: MemoryEstimate | None
    rows: int | None
    rows_from: str
    iterations: int | None
    problems: tuple[Problem, ...] = ()


def make_plan(run: RunConfig) -> ClusterPlan:
    """Plan a run for Ascend.

    Raises ConfigError if it is for no cluster or a key has the wrong type, DataError for an unreadable training file.
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
    # The number of iterations and the directory are unknown to the conditions; any do.
    files = StageFiles(Path("runs"))
    values = partial(mindspeed_values, run, iterations or 1, files)
    written = written_keys(run, iterations or 1, files)
    return replace(plan, problems=(*problems, *run_problems(run, resolved, memory, written, values)))


def read_rates(path: Path) -> Rates:
    """Mean rates of the iterations in an earlier run's ``metrics.jsonl``.

    Raises:
        DataError: the file cannot be read, or a row lacks what MindSpeed-RL logs.
    """
    rows = []
    for number, row in read_json_lines(path):
        values = [row.get(name) for name in ("prompt_length/mean", "response_length/mean", "e2e_tps")]
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            names = "prompt_length/mean, response_length/mean and e2e_tps of MindSpeed-RL"
            raise DataError(f"{path}:{number}: expected numbers above 0 for {names}, found {values}")
        rows.append(values)
    if not rows:
        raise DataError(f"{path}: holds no iteration")
    prompt, response, rate = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return Rates(prompt + response, rate)


def iteration_seconds(resolved: ResolvedConfig, rates: Rates) -> float:
    """Estimate the time of an iteration, in proportion to its tokens and against the number of its NPUs."""
    return resolved.responses * rates.tokens_per_response / (resolved.npus * rates.tokens_per_second)


def run_days(resolved: ResolvedConfig, iterations: int, rates: Rates) -> float:
    """Estimate the days of a run; ``iterations`` of all stages together."""
    return iterations * iteration_seconds(resolved, rates) / _SECONDS_PER_DAY
