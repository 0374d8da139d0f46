"""The start of a run: its checks, from the cheapest to the dearest; ``check`` and ``train`` run the same ones.

Without torch: settings, directory, records, model files, gold answers.  With it: device and packages, prompts, memory.
After them ``check`` loads the weights and samples responses; so does ``train``, which writes the run's settings and
warms up in between.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from coca_mindspeed.config.checks import CHECKS, missing_data, missing_model, or_on_the_hub, same_data, with_steps
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import records_digest
from coca_mindspeed.errors import Problem, find_problems, raise_problems
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.inputs import RunInputs, load_data, read_warm_up_records
from coca_mindspeed.local.logging import require_loggers
from coca_mindspeed.local.model_files import check_template_file, download_model
from coca_mindspeed.local.run_directory import (
    RunState,
    check_same_data,
    check_same_settings,
    check_space,
    open_run_directory,
    starting_model,
    with_model,
    with_stored,
)
from coca_mindspeed.scoring.probe import check_custom_grader
from coca_mindspeed.utils.files import is_hub_id

if TYPE_CHECKING:
    from coca_mindspeed.local.run import LocalRun


@contextmanager
def open_run(
    composed: ComposedConfig,
    output: Path | None,
    *,
    resume: bool = False,
    show_progress: bool = True,
    print_plan: bool = False,
) -> Iterator["LocalRun"]:
    """Check a run, and yield it ready to load its weights; write nothing.

    ``output`` is its directory, which is locked; None: the run is only checked.  ``resume`` continues from the newest
    checkpoint there.  Raises ConfigError, DataError, GradingError or MissingDependencyError for the first check that
    finds a problem, with all its problems.
    """
    config = composed.run
    check_settings(config, resume=resume, heading=f"{composed.name} cannot run:")
    with nullcontext(RunState(Path())) if output is None else open_run_directory(output, resume=resume) as state:
        if resume:
            config = with_stored(config, state)
        if state.has_steps:
            check_same_settings(state, config)
        train, evaluate = load_data(config.data)
        config = with_steps(config, len(train))
        raise_problems(list(warm_up_too_long(config)))
        warm_up = read_warm_up_records(config)
        sets = {"train": train, "evaluate": evaluate, **({"warm_up": warm_up} if warm_up else {})}
        digests = {name: records_digest(records) for name, records in sets.items()}
        if state.has_steps:
            check_same_data(state, config, digests)
        if config.model.path is not None and is_hub_id(config.model.path):
            custom_code = config.model.trust_remote_code
            path = download_model(config.model.path, custom_code=custom_code, show_progress=show_progress)
            config = with_model(config, path=str(path))
        model, where = starting_model(config, state)
        check_space(config, state, model)
        if model is not None:
            check_template_file(model, config.model, where=where)
        with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
            grader.check([*train, *evaluate])
            check_custom_grader(grader, config.data.grader, train, config.method)
            from coca_mindspeed.local.run import LocalRun  # torch and transformers take seconds to import

            inputs = RunInputs(state, config, grader, train, evaluate, warm_up, digests, model, where, show_progress)
            yield LocalRun.checked(inputs, composed.name, print_plan=print_plan)


def warm_up_too_long(config: RunConfig) -> Iterator[Problem]:
    """A problem if ``optimizer.warmup_steps`` exceeds the steps of a stage, so that its rate is never reached."""
    warmup, steps = config.optimizer.warmup_steps, config.trainer.steps
    if warmup > steps:
        reason = (
            f"must be at most trainer.steps={steps}: the learning rate would end at {steps / warmup:.3g} of its value"
        )
        yield Problem("warmup-length", "optimizer.warmup_steps", warmup, reason, f"set it to {steps} or less")


def check_settings(config: RunConfig, *, resume: bool = False, heading: str = "") -> None:
    """Raise ConfigError with all problems of a configuration and of its files, MissingDependencyError for a log.

    A run to ``resume`` has a model of its own, and keeps its data.
    """
    files = [or_on_the_hub(missing_data)] if resume else [or_on_the_hub(missing_data), or_on_the_hub(missing_model)]
    # The number of steps of data.epochs is not known yet.
    checks = CHECKS if config.data.epochs is not None else (*CHECKS, warm_up_too_long)
    raise_problems(find_problems(config, checks, files, [] if resume else [same_data]), heading)
    require_loggers(config.logging)
