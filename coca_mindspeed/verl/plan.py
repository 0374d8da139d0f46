"""The plan of a run on verl: it is composed on verl's own configuration, and checked by verl's own dataclasses.

verl must be installed for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import verl_directories
from coca_mindspeed.config.plan import Plan, QuestionCounts, Row, file_rows, form_notes, question_rows
from coca_mindspeed.data.export import record_of
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.requirements import (
    ACTOR,
    MEGATRON,
    MINI_BATCH,
    ROLLOUT,
    TOKENS,
    TRAIN_FILES,
    VAL_FILES,
    VerlRun,
)
from coca_mindspeed.verl.settings import verl_settings
from coca_mindspeed.verl.upstream_keys import (
    directory_of_verl,
    refused_sections,
    unknown_keys,
    unknown_overrides,
)

_FILES = (TRAIN_FILES, VAL_FILES, "actor_rollout_ref.model.path")


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run with Hydra's overrides, as verl does, into plain containers, interpolations resolved.

    Raises MissingDependencyError without verl; ConfigError if the file cannot be composed, UsageError if only the
    overrides are at fault.
    """
    try:
        return _compose(file, overrides)
    except _ERRORS as error:
        try:
            alone = _compose(file, ())
        except _ERRORS as of_file:
            raise ConfigError(f"{file}: cannot be composed: {of_file}") from of_file
        problems = unknown_overrides(alone, overrides)  # Hydra would tell to add them
        reasons = "\n".join(map(str, problems)) or f"cannot be composed: {error}"
        raise UsageError(f"{file} with {' '.join(overrides)}: {reasons}", problems) from error


_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # ValueError: defaults of wrong types


def _compose(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    search = ",".join(f"'file://{directory}'" for directory in (directory_of_verl(), *verl_directories()))
    with initialize_config_dir(str(file.resolve().parent), version_base=None):
        composed = compose(file.stem, overrides=[f"hydra.searchpath=[{search}]", *overrides])
        values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def make_plan(file: Path, overrides: Sequence[str]) -> Plan:
    """Plan the run of a YAML file on verl, with Hydra's overrides; a run with problems has no rows.

    Raises as :func:`verl_configuration`, and ConfigError for a section ``coca`` that cannot be used.
    """
    config = verl_configuration(file, overrides)
    run = VerlRun(config, verl_settings(config))
    problems = (*unknown_keys(config, overrides), *verl_problems(config, run.settings))
    title = f"{file.stem} on verl"
    if problems := problems or tuple(refused_sections(config)):  # imports verl
        return Plan(title, (), problems=problems)
    counts = _question_counts(run)
    files = TRAIN_FILES, run.value(TRAIN_FILES), VAL_FILES, run.value(VAL_FILES)
    notes = tuple(form_notes(run.settings.method, "coca.method=coca_stable"))
    warnings = counts.warnings(*files) if counts else ()
    return Plan(title, (*_rows(run), *question_rows(counts)), notes=notes, warnings=warnings)


def _question_counts(run: VerlRun) -> QuestionCounts | None:
    """Counts of the files of ``data export``; None if one of the training set is another or is not here.

    Raises DataError for a file that cannot be read.
    """
    train, evaluate = (
        [
            record_of(row.get("extra_info"), f"{path}:{number}: extra_info").question
            for path in map(Path, run.files(key))
            if path.suffix == ".jsonl" and path.is_file()
            for number, row in read_json_lines(path)
        ]
        for key in (TRAIN_FILES, VAL_FILES)
    )
    if not all(path.suffix == ".jsonl" and path.is_file() for path in map(Path, run.files(TRAIN_FILES))):
        return None
    prompts = run.value("data.train_batch_size")
    steps = run.value("trainer.total_training_steps") or run.value("trainer.total_epochs") * (len(train) // prompts)
    return QuestionCounts.of(train, evaluate if run.evaluates else (), steps * prompts)


def _rows(run: VerlRun) -> list[Row]:
    value, devices, nodes = run.value, run.devices, run.value("trainer.nnodes")
    tensor = value(f"{ROLLOUT}.tensor_model_parallel_size")
    method = run.settings.method
    prompts, group, mini = value("data.train_batch_size"), value(f"{ROLLOUT}.n"), value(MINI_BATCH)
    responses, stages = prompts * group, method.training_method.stages
    engine = f"FSDP over {run.ranks} ranks"
    if run.megatron:
        tp, pp = (value(f"{MEGATRON}.{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
        engine = f"Megatron, TP {tp}, PP {pp}, DP {run.ranks}"
    microbatch = value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    new_tokens = responses * value("data.max_response_length")
    steps = value("trainer.total_training_steps")
    length = f"{steps} steps" if steps else f"epochs: {value('trainer.total_epochs')}"
    return [
        ("method", f"{method.name}, loss aggregation {method.loss_aggregation}"),
        ("learning rate", f"{value(f'{ACTOR}.optim.lr'):g}"),
        *file_rows({key: path for key in _FILES if isinstance(path := value(key), str)}),
        ("devices", f"{devices} on {nodes} node{'s' * (nodes > 1)}"),
        ("training", f"{engine}, {responses // run.ranks} responses of a step on each rank"),
        ("trainer", run.trainer),
        ("rollout", f"{run.rollout_devices // tensor} engines of tensor parallel size {tensor}"),
        ("a step", f"{prompts} questions x {group} responses = {responses}"),
        ("updates a step", f"{prompts // mini * value(f'{ACTOR}.ppo_epochs')} of {mini} questions"),
        ("microbatches", f"up to {value(TOKENS)} tokens" if run.dynamic else f"of {microbatch}"),
        ("tokens", f"{run.longest} a sequence at most; {new_tokens:,} new ones a step"),
        ("length", length + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")),
    ]
