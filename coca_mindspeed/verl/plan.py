"""The plan of a run on verl: it is composed on verl's own configuration, whose keys are the only ones allowed.

verl must be installed for it; nothing of it is imported.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import config_directory, named_defaults
from coca_mindspeed.config.plan import Plan, QuestionCounts, Row, file_rows, form_notes, question_rows
from coca_mindspeed.data.export import record_of
from coca_mindspeed.errors import ConfigError, Problem, UsageError, did_you_mean
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.utils.packages import require
from coca_mindspeed.verl.checks import (
    ACTOR,
    MEGATRON,
    MINI_BATCH,
    ROLLOUT,
    TOKENS,
    TRAIN_FILES,
    VAL_FILES,
    VerlRun,
    verl_problems,
)
from coca_mindspeed.verl.settings import NAME, verl_settings

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_BASE = "coca_base"
_ENGINES = ("dp", "megatron")
_FILES = (TRAIN_FILES, VAL_FILES, "actor_rollout_ref.model.path")


def ready_made_verl_runs() -> list[str]:
    """Names of the configurations in ``configs/verl``."""
    return sorted(path.stem for path in (config_directory() / "verl").glob("*.yaml") if path.stem != _BASE)


def find_verl_run(name: str) -> Path | None:
    """The YAML file of a run on verl, by the name of a ready-made one or by its path; None if it is no run on verl."""
    if name in ready_made_verl_runs():
        return config_directory() / "verl" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        return None
    return path if VERLS_OWN in named_defaults(path.stem, [path.parent, *_directories()]) else None


def _directories() -> tuple[Path, Path]:
    """Where a file of one's own finds ours: ``coca_qwen25_7b``, or ``verl/coca_qwen25_7b``."""
    return config_directory() / "verl", config_directory()


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run with Hydra's overrides, as verl does, into plain containers, interpolations resolved.

    Raises MissingDependencyError without verl; ConfigError if it cannot be composed, UsageError if there are overrides.
    """
    search = ",".join(f"'file://{directory}'" for directory in (_directory_of_verl(), *_directories()))
    try:
        with initialize_config_dir(str(file.resolve().parent), version_base=None):
            composed = compose(file.stem, overrides=[f"hydra.searchpath=[{search}]", *overrides])
            values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # ValueError: odd defaults
        if overrides:
            raise UsageError(f"{file} with {' '.join(overrides)}: cannot be composed: {error}") from error
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _directory_of_verl() -> Path:
    """``trainer/config`` of the installed verl, which is not imported."""
    require("verl", purpose="a run on verl is checked by verl's own configuration (docs/verl.md)")
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / "trainer" / "config"


def unknown_keys(values: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Problem]:
    """A problem for each key that verl's configuration lacks, unless an override adds it with a plus.

    Hydra itself refuses such a key in an override, but not in a file.
    """
    with initialize_config_dir(str(_directory_of_verl().resolve()), version_base=None):
        engines = [compose(VERLS_OWN, overrides=[f"model_engine={engine}"]) for engine in _ENGINES]
    for config in engines:
        OmegaConf.set_struct(config, False)
    known: Any = OmegaConf.to_container(OmegaConf.merge(*engines))
    added = [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]
    yield from _unknown({key: value for key, value in values.items() if key != NAME}, known, "", added)


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], under: str, added: list[str]) -> Iterator[Problem]:
    for name, value in values.items():
        key = f"{under}{name}"
        if any(f"{key}.".startswith(f"{each}.") for each in added):
            continue
        if name in known:
            # An empty section and the overrides of another configuration take any key.
            if isinstance(value, Mapping) and isinstance(known[name], Mapping) and "override_" not in name:
                yield from _unknown(value, known[name], f"{key}.", added) if known[name] else ()
        elif not any(each.startswith(f"{key}.") for each in added):
            expected = f"must be a key of verl's configuration{did_you_mean(str(name), known)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")


def make_plan(file: Path, overrides: Sequence[str]) -> Plan:
    """Plan the run of a YAML file on verl, with Hydra's overrides; a run with problems has no rows.

    Raises as :func:`verl_configuration`, and ConfigError for a section ``coca`` that cannot be used.
    """
    config = verl_configuration(file, overrides)
    run = VerlRun(config, verl_settings(config))
    problems = (*unknown_keys(config, overrides), *verl_problems(config, run.settings))
    title = f"{file.stem} on verl"
    if problems:
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
