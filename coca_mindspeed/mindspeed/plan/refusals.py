"""Every reason that we know beforehand why a run for Ascend would fail: the plan's, and the conditions of the hooks."""

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.plan.cluster_plan import Plan
from coca_mindspeed.mindspeed.start.driver import split_config
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values

_PREFIX = "mindspeed_rl."


def refusals(run: RunConfig, plan: Plan) -> list[str]:
    """One line for each reason; a key that the plan refuses is not refused a second time by the hooks."""
    planned = {problem.key for problem in plan.problems}
    hooks = [line for line in _conditions(run, plan) if line.split(":")[0].split("=")[0] not in planned]
    return [*map(str, plan.problems), *hooks]


def _conditions(run: RunConfig, plan: Plan) -> list[str]:
    """What the driver would refuse of the file that is written for it, under the keys of the run."""
    counted = replace(plan, iterations=plan.iterations or 1)  # how many there are is the plan's to know
    try:
        split_config(OmegaConf.create(mindspeed_values(run, counted, StageFiles(Path("runs")))))
    except ConfigError as error:
        return [line if line.startswith(_PREFIX) else f"{_PREFIX}{line}" for line in str(error).splitlines()]
    return []
