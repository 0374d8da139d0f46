"""MindSpeed-RL's sections of a composed run, resolved for one stage: values, their YAML, and the marker of the run."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coca_mindspeed.config.checks import check_resumed_settings
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.run_marker import RunMarker, read_run_marker
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, Problem, raise_problems
from coca_mindspeed.mindspeed.checkpoints import newest_iteration
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.keys import WRITTEN, identity_keys, put
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.start.process import VALIDATION, CocaSettings
from coca_mindspeed.scoring.settings import stored_section
from coca_mindspeed.utils.directories import nearby_runs
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.json_files import read_steps
from coca_mindspeed.utils.text_formats import value_of

# Files and directories, made absolute: Ray's workers have working directories of their own.
_PATHS = (
    "megatron_training.data_path",
    "coca.eval_data",
    "megatron_training.tokenizer_name_or_path",
    "actor_config.load",
)


@dataclass(frozen=True, slots=True)
class StageFiles:
    """Where one stage of a run writes; a method with one stage has stage 0 only."""

    output: Path
    stage: int = 0

    @property
    def results(self) -> Path:
        """Samples, validations and ``metrics.jsonl``."""
        return self.output / f"stage{self.stage}"

    @property
    def checkpoints(self) -> Path:
        return self.results / "checkpoints"


def stages_to_do(start: ClusterRun, output: Path, *, resume: bool) -> list[tuple[int, bool]]:
    """``(stage, whether it has a checkpoint to resume from)`` of the unfinished stages, in order.

    Raises ConfigError if ``output`` holds a run and ``resume`` is not set, or none and ``resume`` is set.
    """
    files, iterations = [StageFiles(output, stage) for stage in range(start.stages)], start.iterations
    reached = [newest_iteration(stage.checkpoints) for stage in files]
    if not resume and any(iteration is not None for iteration in reached):
        raise ConfigError(f"--output {output}: already holds a run; add --resume to continue it, or choose another")
    if resume and all(iteration is None for iteration in reached):
        nearby = nearby_runs(output, lambda other: any(other.glob("stage*/checkpoints")))
        fix = f"correct --output, or leave --resume out to start a run{nearby}"
        raise_problems([Problem("no-run", "--output", output, "holds no checkpoint to resume", fix)])
    return [
        (stage, iteration is not None)
        for stage, iteration in enumerate(reached)
        if iterations is None
        or (iteration or 0) < iterations
        or (iteration == iterations and not _is_validated(start.run, files[stage].results / VALIDATION, iteration))
    ]


def _is_validated(run: RunConfig, log: Path, iteration: int) -> bool:
    """Whether the validation after the last iteration, which follows its checkpoint, is logged."""
    if not run.evaluation.interval or run.data.evaluate is None:
        return True
    return log.exists() and any(row["step"] == iteration for row in read_steps(log, torn_end=True))


def mindspeed_values(
    start: ClusterRun, iterations: int | None, files: StageFiles, *, resume: bool = False
) -> dict[str, Any]:
    """MindSpeed-RL's sections for one stage of a run without problems, which has ``iterations`` of them.

    ``resume`` loads the newest checkpoint of the stage with its optimizer, instead of the initial weights.  Raises
    ConfigError for an unknown stage, if a checkpoint to load is missing, the number of iterations is
    unknown, or the run to resume has other settings or data.
    """
    run = start.run
    try:
        run.method.checked_stage(files.stage)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if iterations is None:
        raise ConfigError(
            f"data.epochs={run.data.epochs}: the number of questions is not known; prepare {run.data.train}, or set "
            "data.rows, or data.epochs=null and trainer.steps"
        )
    values = deepcopy(start.values)
    for key in _PATHS:
        if isinstance(path := value_of(values, key), str):
            put(values, key, str(Path(path).absolute()))
    for key, (source, value) in WRITTEN.items():
        theirs = start.native and source.startswith(("optimizer.", "logging."))
        if not theirs and (found := value(run, iterations, files)) is not None:
            put(values, key, found)
    _fix_reference(values, start)
    put(values, "coca.data_sha256", {path: file.sha256 for path, file in start.files.items()})
    actor = values["actor_config"]
    if resume:
        if newest_iteration(files.checkpoints) is None:
            raise ConfigError(f"--resume: {files.checkpoints} holds no checkpoint")
        check_resume(files.results, values)
        actor |= {"load": actor["save"], "finetune": False, "no_load_optim": False, "no_load_rng": False}
    elif files.stage > 0:
        before = StageFiles(files.output, files.stage - 1)
        check_resume(before.results, values)
        actor["load"] = str(before.checkpoints.absolute())
    return values


def check_begun_run(start: ClusterRun, output: Path) -> bool:
    """Whether ``output`` holds checkpoints of the run; raises ConfigError if they are of a run that cannot go on so."""
    stages = [StageFiles(output, stage) for stage in range(start.stages)]
    begun = [stage for stage in stages if newest_iteration(stage.checkpoints) is not None]
    for stage in begun:
        mindspeed_values(start, start.iterations, stage, resume=True)
    return bool(begun)


def stage_marker(values: Mapping[str, Any], prompt: TrainedPrompt | None = None) -> RunMarker:
    """The marker of a stage with the values of :func:`mindspeed_values`."""
    coca = stored_section(CocaSettings, values["coca"], "this run")
    digests = coca.pop("data_sha256")
    files = {"train": values["megatron_training"].get("data_path"), "evaluate": coca["eval_data"]}
    data = {use: {"file": path, "sha256": digests[path]} for use, path in files.items() if path in digests}
    return RunMarker(engine="mindspeed_rl", settings={**values, "coca": coca}, data=data, prompt=prompt)


def check_resume(directory: Path, values: Mapping[str, Any]) -> None:
    """Compare with the run whose checkpoints are in ``directory``; a launch leaves its marker."""
    before = read_run_marker(directory, "mindspeed_rl")
    if before is None:
        return
    coca = stored_section(CocaSettings, before.settings.get("coca") or {}, directory)
    then, now, same = {**before.settings, "coca": coca}, stage_marker(values), identity_keys()

    def may_change(key: str) -> bool:
        return not any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in same)

    fix = "resume it with the same settings and files, or choose another --output"
    check_resumed_settings(then, now.settings, where=directory, fix=fix, may_change=may_change)
    if "train" in before.data and "train" in now.data:
        data = ({"data": {"train": marker.data["train"]}} for marker in (before, now))
        check_resumed_settings(*data, where=directory, fix=fix)


def _fix_reference(values: dict[str, Any], start: ClusterRun) -> None:
    """Keep the reference at the initial weights in every stage and after every resume.

    MindSpeed-RL's integrated worker otherwise loads its reference from where it loads the actor.
    """
    view = MindSpeedView(values)
    if not view.reference or not view.integrated:
        return
    key = "rl_config.integrated_mode_config.ref_model_load_path"
    if (reference := value_of(values, key) or value_of(values, "actor_config.load")) is None:
        prefix, weights = "" if start.native else "mindspeed_rl.", start.key("model.megatron_path")
        needs = "the reference needs Megatron weights: set"
        raise ConfigError(f"{prefix}rl_config.init_kl_coef: {needs} {weights}, or {prefix}{key}")
    put(values, key, reference)


def run_file_text(values: dict[str, Any], name: str) -> str:
    """The YAML of :func:`mindspeed_values` for the run ``name``."""
    heading = f"# MindSpeed-RL's configuration of the run {name}, written by coca-mindspeed.\n"
    return heading + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)


def write_run_file(path: Path, values: dict[str, Any], name: str) -> None:
    """Write :func:`run_file_text`, atomically; raises ConfigError for a directory, or a file in none."""
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: {path.parent} is not a directory; create it first")
    if path.is_dir():
        raise ConfigError(f"--write {path}: is a directory; name a file in it")
    write_atomically(path, run_file_text(values, name))
