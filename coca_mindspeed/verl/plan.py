"""The plan of a run on verl: it is composed on verl's own configuration, and checked by verl's own dataclasses.

verl must be installed for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import verl_directories
from coca_mindspeed.config.plan import Phase, Plan, Row, file_rows
from coca_mindspeed.config.preflight import Names, preflight
from coca_mindspeed.config.unusual import late_checkpoint, unusual_values
from coca_mindspeed.data.flaws import questions_of
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError, Problem, UsageError, raise_problems, show_value
from coca_mindspeed.utils.json_files import read_json_lines, read_steps
from coca_mindspeed.verl.checkpoints import check_length
from coca_mindspeed.verl.checks import checked_record, verl_problems
from coca_mindspeed.verl.memory import (
    Shapes,
    cached_sequences,
    checkpoint_gib,
    estimated,
    host_gib,
    memory_warnings,
    phases,
    read_shapes,
)
from coca_mindspeed.verl.requirements import (
    ACTOR,
    CORRECTION,
    MEGATRON,
    ROLLOUT,
    TOKENS,
    TRAIN_FILES,
    VAL_FILES,
    VerlRun,
)
from coca_mindspeed.verl.settings import verl_settings
from coca_mindspeed.verl.upstream_keys import (
    changed_keys,
    directory_of_verl,
    keys_without_effect,
    refused_sections,
    unknown_keys,
    unknown_overrides,
)

_OPTIMIZER = ("betas", "weight_decay", "clip_grad")
_FILES = (TRAIN_FILES, VAL_FILES, "actor_rollout_ref.model.path")


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run with Hydra's overrides, as verl does, into plain containers; interpolations are resolved.

    Raises MissingDependencyError without verl; ConfigError if the file cannot be composed, UsageError if only the
    overrides are at fault.
    """
    return _composed(file, overrides)[0]


def _composed(file: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration with its interpolations resolved, and as it is written."""
    try:
        return _compose(file, overrides)
    except _ERRORS as error:
        try:
            alone, _ = _compose(file, ())
        except _ERRORS as of_file:
            raise ConfigError(f"{file}: cannot be composed: {of_file}") from of_file
        problems = unknown_overrides(alone, overrides)  # Hydra would tell to add them
        reasons = "\n".join(map(str, problems)) or f"cannot be composed: {error}"
        raise UsageError(f"{file} with {' '.join(overrides)}: {reasons}", problems) from error


_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # ValueError: defaults of wrong types


def _compose(file: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    search = ",".join(f"'file://{directory}'" for directory in (directory_of_verl(), *verl_directories()))
    with initialize_config_dir(str(file.resolve().parent), version_base=None):
        composed = compose(file.stem, overrides=[f"hydra.searchpath=[{search}]", *overrides])
        resolved: Any = OmegaConf.to_container(composed, resolve=True)
        written: Any = OmegaConf.to_container(composed)
    return resolved, written


class ComposedRun(NamedTuple):
    """A run on verl, from its check to its training: its file, overrides, and what they compose.

    ``written`` is its configuration with the interpolations as they are written.
    """

    file: Path
    overrides: Sequence[str]
    run: VerlRun
    written: Mapping[str, Any]


def compose_verl_run(file: Path, overrides: Sequence[str]) -> ComposedRun:
    """Compose the run of a YAML file on verl, with Hydra's overrides.

    Raises as :func:`verl_configuration`, and ConfigError for a section ``coca`` that cannot be used.
    """
    config, written = _composed(file, overrides)
    return ComposedRun(file, overrides, VerlRun(config, verl_settings(config)), written)


def make_plan(file: Path, overrides: Sequence[str], metrics: Path | None = None) -> Plan:
    """Plan the run of a YAML file on verl; raises as :func:`compose_verl_run` and :func:`plan_run`."""
    return plan_run(compose_verl_run(file, overrides), metrics)


def plan_run(composed: ComposedRun, metrics: Path | None = None) -> Plan:
    """Plan a composed run; one with problems has no rows.

    ``metrics`` is ``metrics.jsonl`` of an earlier run of the same sizes, for the time; raises DataError if the time
    cannot be read from it.
    """
    file, overrides, run, written = composed
    config = run.values
    problems = (
        *unknown_keys(config, overrides),
        *verl_problems(config, run.settings),
        *keys_without_effect(written, config),
    )
    title = f"{file.stem} on verl"
    if problems := problems or tuple(refused_sections(config)):  # imports verl
        return Plan(title, (), problems=problems)
    train, evaluate = _questions(run, TRAIN_FILES), _questions(run, VAL_FILES) if run.evaluates else ()
    steps = _steps(run, None if train is None else len(train))
    questions = None
    if train is not None and steps is not None:
        questions = questions_of(train, evaluate or (), steps * run.layout.prompts, run.settings.grader)
    shapes = read_shapes(Path(str(run.value("actor_rollout_ref.model.path")))) if estimated(run) else None
    npu = run.value("trainer.device") == "npu" or find_spec("torch_npu") is not None
    memory = () if shapes is None else phases(run, shapes, npu=npu)
    asked = None if evaluate is None else _limited(run, "data.val_max_samples", len(evaluate))
    changed = (
        f"verl's own key {key}={show_value(value)}, by default {show_value(default)}"
        for key, value, default in changed_keys(written, config, "upstream")
    )
    files = (TRAIN_FILES, run.value(TRAIN_FILES)), (VAL_FILES, run.value(VAL_FILES))
    sizes = (*_size_rows(run, shapes, memory), ("time", _time(run, steps, metrics)))
    return preflight(
        title,
        run.settings.method,
        Names("coca.method=coca_stable", "data.max_response_length", *files),
        run.layout,
        memory=memory,
        questions=lambda: questions,
        rows=(*_rows(run), *_length_rows(run, steps, asked), *sizes),
        notes=changed,
        # Memory is an estimate that was not compared with a device: too little of it is a warning.
        warnings=(*_warnings(run, steps), *memory_warnings(run, shapes, memory)),
    )


def _size_rows(run: VerlRun, shapes: Shapes | None, memory: Sequence[Phase]) -> Iterator[Row]:
    """Model, KV cache, host memory and disk; all are estimates."""
    if shapes is None:
        reason = "of FSDP without LoRA alone" if not estimated(run) else "needs config.json of a Llama, Mistral or Qwen"
        yield "memory", f"not estimated: {reason}"
        return
    yield "model", f"{shapes.parameters / 1e9:.2f} billion parameters, {shapes.layers} layers"
    held = cached_sequences(run, shapes, memory[-1])
    yield "KV cache", f"{held:.0f} sequences of {run.layout.longest} tokens in each engine, estimated"
    yield "host memory", f"{host_gib(run, shapes):.0f} GiB of a node for offloaded state, estimated"
    one, kept = checkpoint_gib(run, shapes), run.value("trainer.max_actor_ckpt_to_keep")
    if run.value("trainer.save_freq") > 0:
        most = f"at most {(kept + 1) * one:.0f} GiB at once" if kept else "all are kept"
        yield "disk", f"{one:.0f} GiB a checkpoint, {most}, estimated"


def _time(run: VerlRun, steps: int | None, metrics: Path | None) -> str:
    """The time of a run by the steps and validations of an earlier one; raises DataError for a file without them."""
    if metrics is None:
        return "unknown: --metrics names metrics.jsonl of a --trial"
    rows = [row["data"] for row in read_steps(metrics)]
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    if not seconds:
        raise DataError(f"{metrics}: has no timing_s/step of verl's")
    step = median(seconds)
    tests = [row["timing_s/testing"] for row in rows if "timing_s/testing" in row]
    shown = f"{step:.0f} s a step, without validations, estimated by {len(seconds)} steps of {metrics}"
    if steps is None:
        return shown
    number = run.validations(steps)
    hours = (steps * step + (number * median(tests) if tests else 0)) / 3600
    with_tests = f"with {number} validations" if tests else f"without {number} validations"
    return f"{hours:.1f} hours {with_tests}; {shown}"


def _questions(run: VerlRun, key: str) -> list[Record] | None:
    """The records of files of ``data export``; None if one is of another kind or is not here.

    Raises DataError for a file that cannot be read, or was made for another method.
    """
    paths = [Path(path) for path in run.files(key)]
    if not all(path.suffix == ".jsonl" and path.is_file() for path in paths):
        return None
    prompt = run.settings.method.system_prompt
    rows = ((f"{path}:{number}", row) for path in paths for number, row in read_json_lines(path))
    return [checked_record(row, where, prompt) for where, row in rows]


def _limited(run: VerlRun, key: str, rows: int) -> int:
    """Of these rows, as many as verl takes; a negative limit is none."""
    limit = run.value(key)
    return rows if limit is None or limit < 0 else min(rows, limit)


def _steps(run: VerlRun, records: int | None) -> int | None:
    """Steps of the whole run; None if it depends on files that are not here.

    Raises ConfigError if the records make no step, or fewer steps than the run is to have.
    """
    steps: int | None = run.value("trainer.total_training_steps")
    if records is None:
        return steps
    taken, epochs = _limited(run, "data.train_max_samples", records), int(run.value("trainer.total_epochs"))
    if taken < run.layout.prompts:
        reason = f"must be at most the {taken} questions of {TRAIN_FILES}: verl leaves an incomplete batch out"
        raise_problems([Problem("length", "data.train_batch_size", run.layout.prompts, reason)])
    per_epoch = taken // run.layout.prompts
    if steps is not None:
        check_length(steps, per_epoch, epochs)
    return steps or epochs * per_epoch


def _warnings(run: VerlRun, steps: int | None) -> Iterator[Problem]:
    """Settings by which a run trains but leaves less than it should."""
    if (interval := run.value("trainer.save_freq")) <= 0:
        reason = "no checkpoint is written, not even at the end: a stopped run starts over, and the weights are lost"
        yield Problem("no-checkpoint", "trainer.save_freq", interval, reason, "set trainer.save_freq=50")
    threshold, corrected = f"{CORRECTION}.rollout_is_threshold", run.value(f"{CORRECTION}.rollout_is") is not None
    keys = {name: f"{ACTOR}.optim.{name}" for name in ("lr", "weight_decay", "betas")}
    keys |= {"grad_clip": f"{ACTOR}.optim.clip_grad", "max_new_tokens": "data.max_response_length"}
    values = {name: (key, run.value(key)) for name, key in keys.items()}
    values["clip"] = "coca.method.clip", run.settings.method.clip
    values["seconds"] = "coca.grading.seconds", run.settings.grading.get("seconds")
    values["is_threshold"] = threshold, run.value(threshold) if corrected else None
    yield from unusual_values(values, lora=bool(run.value("actor_rollout_ref.model.lora_rank")))
    yield from late_checkpoint("trainer.save_freq", interval, steps)
    if steps == 1:
        reason = (
            "the run ends after one update of the weights" if run.layout.updates == 1 else "the run ends after one step"
        )
        yield Problem("one-step", "trainer.total_training_steps", steps, reason)


def _length_rows(run: VerlRun, steps: int | None, held_out: int | None) -> Iterator[Row]:
    """Length of the run, validation and checkpoints; ``steps`` and ``held_out`` questions are None if unknown."""
    stages = run.settings.method.training_method.stages
    length = f"epochs: {run.value('trainer.total_epochs')}" if steps is None else f"{steps:,} steps"
    yield "length", length + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")
    tests, saves = run.value("trainer.test_freq"), run.value("trainer.save_freq")
    times = [f"every {tests} steps, at the end"] if tests > 0 else []
    times += ["before the first step"] if run.value("trainer.val_before_train") else []
    asked = ""
    if held_out and steps is not None:
        responses = held_out * run.validations(steps)
        share = responses / max(1, steps * run.layout.prompts * run.layout.group)
        asked = f": {responses:,} responses in all, {share:.2g} of the training's"
    yield "validation", f"{', '.join(times)}{asked}" if times else "none: nothing shows what holds on new questions"
    kept = run.value("trainer.max_actor_ckpt_to_keep")
    shown = f"every {saves} steps and at the end, {f'the newest {kept}' if kept else 'all'} are kept"
    yield "checkpoints", shown if saves > 0 else "none: the trained weights are lost"


def _rows(run: VerlRun) -> list[Row]:
    value, layout, nodes = run.value, run.layout, run.value("trainer.nnodes")
    method = run.settings.method
    engine = f"FSDP over {layout.ranks} ranks"
    if run.megatron:
        tp, pp = (value(f"{MEGATRON}.{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
        engine = f"Megatron, TP {tp}, PP {pp}, DP {layout.ranks}"
    microbatch = value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    new_tokens = layout.responses * layout.max_new
    updates = f"{layout.updates} of {layout.mini_batch} questions"
    if layout.updates > 1:
        updates += "; all but the first train on responses of earlier weights, which coca.method.clip limits"
    return [
        ("method", f"{method.name}, loss aggregation {method.loss_aggregation}"),
        ("learning rate", f"{value(f'{ACTOR}.optim.lr'):g}"),
        ("optimizer", ", ".join(f"{name} {value(f'{ACTOR}.optim.{name}')}" for name in _OPTIMIZER)),
        ("temperature", f"{value(f'{ROLLOUT}.temperature'):g}"),
        ("order of data", f"shuffled, seed {value('data.seed')}" if value("data.shuffle") else "as in the file"),
        *file_rows({key: path for key in _FILES if isinstance(path := value(key), str)}),
        ("devices", f"{layout.devices} on {nodes} node{'s' * (nodes > 1)}"),
        ("training", f"{engine}, {layout.rank_responses} responses of a step on each rank"),
        ("trainer", run.trainer),
        ("rollout", f"{layout.engines} engines of tensor parallel size {layout.engine_devices}"),
        ("a step", f"{layout.prompts} questions x {layout.group} responses = {layout.responses}"),
        ("updates a step", updates),
        ("microbatches", f"up to {value(TOKENS)} tokens" if run.dynamic else f"of {microbatch}"),
        ("tokens", f"{layout.longest} a sequence at most; {new_tokens:,} new ones a step"),
    ]
