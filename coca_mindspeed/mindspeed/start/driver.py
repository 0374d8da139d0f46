"""Check a run on this machine, connect to Ray, and call MindSpeed-RL's ``train`` with the hooks applied.

The environment names the checkouts: ``MINDSPEED_RL_HOME``, ``MEGATRON_HOME``, ``MINDSPEED_HOME`` and
``MINDSPEED_LLM_HOME``.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from coca_mindspeed.errors import (
    ConfigError,
    MissingDependencyError,
    Problem,
    TrainingError,
    raise_problems,
)
from coca_mindspeed.mindspeed.checkpoints import check_checkpoint, newest_iteration
from coca_mindspeed.mindspeed.checks import ignored_keys, split_config
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.start.process import (
    CPU_SHIM,
    VARIABLE,
    CocaSettings,
    ProcessSettings,
    check_cpu_shim,
    setup_driver,
)
from coca_mindspeed.mindspeed.start.records import (
    RecordFile,
    check_weights_on_nodes,
    encode_files,
    take_files,
    weights_digests,
)
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from coca_mindspeed.upstream.launch import WEIGHT_FORMAT
from coca_mindspeed.upstream.manifest import manifest_of, matching_manifest
from coca_mindspeed.upstream.ray_cluster import own_signal_handlers, set_ray_defaults, wait_for_slow_nodes
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of

#: Environment variable -> a package that its checkout must hold.
CHECKOUTS = {
    "MINDSPEED_RL_HOME": "mindspeed_rl",
    "MEGATRON_HOME": "megatron",
    "MINDSPEED_HOME": "mindspeed",
    "MINDSPEED_LLM_HOME": "mindspeed_llm",
}
_SOURCES = {  # of release 2.3.0, as in docs/ascend.md
    "MINDSPEED_RL_HOME": ("https://gitcode.com/Ascend/MindSpeed-RL.git", "09b8c12"),
    "MEGATRON_HOME": ("https://github.com/NVIDIA/Megatron-LM.git", "core_v0.12.1"),
    "MINDSPEED_HOME": ("https://gitcode.com/Ascend/MindSpeed.git", "674226a"),
    "MINDSPEED_LLM_HOME": ("https://gitcode.com/Ascend/MindSpeed-LLM.git", "62d4640"),
}
# Variables of Ray's workers that must have one value: a problem's code, name, value, reason.
_TASK_QUEUE = (  # MindSpeed-RL's page on graph mode (docs/zh/features/acl_graph.md); its file says 2, for eager mode
    "task-queue",
    "TASK_QUEUE_ENABLE",
    "1",
    "generate_config.enforce_eager=false",
)
#: Of Ray without an NPU: MindSpeed-RL reserves tens of CPUs by number, which need not exist there.
HOST_CPUS = 64
_FRAME = re.compile(r'File "(.+)", line (\d+), in .+\n\s+(\S.*)')  # of a traceback: file, line, source line
_WORKER_SETUP = "coca_mindspeed.mindspeed.start.process.setup_worker"


def find_checkouts(environment: Mapping[str, str]) -> dict[str, Path]:
    """The checkouts that the environment names; raises ``MissingDependencyError`` for each that is not there."""
    paths = {variable: environment.get(variable, "") for variable in CHECKOUTS}
    missing = [
        f"{variable}{f'={path}' * bool(path)}: expected a checkout with a folder {CHECKOUTS[variable]}/, found none\n"
        f"    {_how_to_get(variable)}"
        for variable, path in paths.items()
        if not path or not (Path(path) / CHECKOUTS[variable]).is_dir()
    ]
    if missing:
        guide = "The guide is docs/ascend.md, 2. Software."
        raise MissingDependencyError("\n".join([*missing, guide]))
    return {variable: Path(path).resolve() for variable, path in paths.items()}


def _how_to_get(variable: str) -> str:
    url, commit = _SOURCES[variable]
    place = f"/opt/{Path(url).stem}"
    return f"git clone {url} {place} && git -C {place} checkout {commit} && export {variable}={place}"


def process_settings_of(settings: CocaSettings, config: DictConfig, checkouts: Mapping[str, Path]) -> ProcessSettings:
    """The settings of every Ray process; raises ``ManifestError`` if the MindSpeed-RL is not a supported one."""
    root = checkouts["MINDSPEED_RL_HOME"]
    # MindSpeed-RL's guide copies the other three into its folder: it comes last, so that the checkouts win over copies.
    others = [path for variable, path in checkouts.items() if variable != "MINDSPEED_RL_HOME"]
    return ProcessSettings(
        coca=settings,
        mindspeed_rl_home=root,
        import_paths=(*others, root),
        release=matching_manifest(root).release,
        reference=MindSpeedView(config).reference,
        max_new_tokens=value_of(config, "generate_config.sampling_config.max_tokens"),
        cpu_shim=os.environ.get(CPU_SHIM),
    )


def worker_variables(
    process: ProcessSettings, config: DictConfig, environment: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Environment variables of Ray's workers: ``name -> (value, source)``.

    The names are those of MindSpeed-RL's ``runtime_env.yaml`` and of the settings below.  Ray gives them precedence
    over a worker's own environment, so a value that is exported where the driver starts is put in their place.

    Raises ConfigError if the file cannot be read, or an exported value contradicts the configuration.
    """
    rl, generate = config.get("rl_config") or {}, config.get("generate_config") or {}
    uncut = manifest_of(process.release).uncut_sampling_environment
    path = process.mindspeed_rl_home / rl.get("runtime_env_path", "configs/envs/runtime_env.yaml")
    try:
        variables = (read_yaml(path) or {}).get("env_vars", {})
    except (OSError, YamlError) as error:
        raise ConfigError(f"rl_config.runtime_env_path: {path} cannot be read: {error}") from error
    assigned = {key: (str(value), path.name) for key, value in variables.items()}
    if (buffer := rl.get("hccl_buffersize")) is not None:  # a key of MindSpeed-RL's master
        assigned["HCCL_BUFFSIZE"] = str(buffer), "rl_config.hccl_buffersize"
    sampling = generate.get("sampling_config") or {}
    top_k = int(sampling.get("top_k", 50))  # MindSpeed-RL's default
    if top_k <= 0 and float(sampling.get("top_p", 1.0)) == 1.0:
        assigned |= {name: (value, "no top_k or top_p") for name, value in uncut.items()}
    required = [WEIGHT_FORMAT] if generate.get("enforce_eager", True) else [WEIGHT_FORMAT, _TASK_QUEUE]
    wrong = []
    for code, key, value, because in required:
        assigned[key] = value, because
        if (given := environment.get(key, value)) != value:
            wrong.append(Problem(code, key, given, f"must be {value}: {because}", f"unset {key}; the run sets it"))
    raise_problems(wrong)
    for key, (value, source) in assigned.items():
        if environment.get(key, value) != value:
            assigned[key] = environment[key], f"exported; {value} by {source}"
    return assigned


def runtime_environment(
    process: ProcessSettings, variables: Mapping[str, tuple[str, str]], worker_setup: str = _WORKER_SETUP
) -> dict[str, Any]:
    """Ray's runtime environment: :func:`worker_variables`, our settings, and the function that sets up a worker."""
    own_package = Path(__file__).resolve().parents[3]
    python_path = [str(own_package), *map(str, process.import_paths), os.environ.get("PYTHONPATH", "")]
    return {
        "env_vars": {
            **{name: value for name, (value, _) in variables.items()},
            "IS_MULTIMODAL": "False",
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            VARIABLE: process.model_dump_json(),
        },
        "worker_process_setup_hook": worker_setup,
    }


def check_inputs(
    settings: CocaSettings, config: DictConfig, files: Mapping[str, RecordFile], name_of: Callable[[str], str] = str
) -> dict[str, RecordFile]:
    """Check the method and the prompts before any NPU is held; return the files with prompts if the tokenizer is here.

    ``name_of`` gives the names of our keys in the run's file.
    """
    from coca_mindspeed.scoring.responses import check_custom_method  # it imports torch

    check_custom_method(settings.method)
    view = MindSpeedView(config)
    if (tokenizer := view.value("megatron_training.tokenizer_name_or_path")) is None:
        return dict(files)
    return encode_files(Path(tokenizer), files, settings, view.value("rl_config.max_prompt_length"), name_of)


def check_weights(config: DictConfig, *, reference: bool) -> None:
    """Check that the checkpoints to load exist: without them Megatron trains from random weights.

    Raises ConfigError if a ``load`` holds no checkpoint, or none with optimizer state where that is to be loaded.
    """
    view, actor = MindSpeedView(config), "megatron_training"
    load = view.value(f"{actor}.load")
    named = {view.place(f"{actor}.load"): load}
    if reference:
        for key in ("ref_config.load", "rl_config.integrated_mode_config.ref_model_load_path"):
            named[key] = value_of(config, key)
    for key, path in named.items():
        if path is not None:
            try:
                check_checkpoint(Path(path))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
    resumes = view.value(f"{actor}.finetune") is False and view.value(f"{actor}.no_load_optim") is False
    if load is not None and resumes and newest_iteration(Path(load)) is None:
        raise ConfigError(
            f"{view.place(f'{actor}.no_load_optim')}: false beside finetune: false resumes a training, and {load} has "
            "converted weights without optimizer state; name the checkpoints of a training"
        )


def weight_folders(config: DictConfig) -> list[Path]:
    """Folders that every node reads alike: the model's own, and weights that a converter has written.

    Of a checkpoint, a node needs only the part of its own ranks.
    """
    keys = "megatron_training.tokenizer_name_or_path", "megatron_training.load"
    model, load = map(MindSpeedView(config).value, keys)
    folders = [] if model is None else [Path(model)]
    if load is not None and newest_iteration(Path(load)) is None:
        folders.append(Path(load))
    return [folder for folder in folders if folder.is_dir()]


def start_ray(process: ProcessSettings, config: DictConfig, environment: Mapping[str, Any]) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or start one on this machine, whatever else runs there.

    Raises DataError if a node has other weights, and TrainingError if one cannot start its processes.
    """
    import ray

    arguments: dict[str, Any] = {"runtime_env": dict(environment), "log_to_driver": True}
    if not os.environ.get("RAY_ADDRESS"):
        wait_for_slow_nodes(300)
        arguments["address"] = "local"
        if process.coca.platform == "host":
            roles = [config.rl_config.get(f"{role}_resource") or {} for role in ("actor", "reference", "reward")]
            npus = sum(int(role.get("num_npus") or 0) for role in roles)
            arguments |= {"num_cpus": HOST_CPUS, "resources": {"NPU": npus}, "include_dashboard": False}
    with own_signal_handlers():
        ray.init(**arguments)
    try:
        check_weights_on_nodes(weights_digests(weight_folders(config)))
    except ray.exceptions.RayError as error:  # of the first tasks on each node, which set its processes up
        ray.shutdown()
        print(error, file=sys.stderr)
        raise TrainingError(f"a node of the Ray cluster cannot start its processes: {_cause(error)}") from error
    except BaseException:
        ray.shutdown()
        raise


def run_mindspeed_rl(config: DictConfig, setup: Callable[[], object] = setup_driver) -> None:
    """Call MindSpeed-RL's ``train`` in this Ray process, with the hooks applied; its actors are exported from here."""
    setup()
    train_grpo = importlib.import_module("cli.train_grpo")
    train_grpo.train._function(config)


@dataclass(frozen=True)
class Training:
    """A training that may start: settings of all processes, MindSpeed-RL's own, variables of workers, record files."""

    process: ProcessSettings
    config: DictConfig
    variables: dict[str, tuple[str, str]]
    files: Mapping[str, RecordFile]


def prepare(
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    files: Mapping[str, RecordFile],
    *,
    before: Training | None = None,
    name_of: Callable[[str], str] = str,
) -> Training:
    """Check MindSpeed-RL's sections on this machine, and what they name: checkouts, weights, prompts.

    ``files`` are the record files of the sections, by path.  Of a later stage, ``before`` is the stage before: its
    method and prompts are not checked again.  ``name_of`` gives the names of our keys in the run's file.  Prints keys
    that are ignored, and the variables of Ray's workers.  Raises CocaError if the run cannot work.
    """
    checkouts = find_checkouts(environment)
    raise_problems(shipped_keys().problems(values))  # types, before values are compared
    settings, config = split_config(OmegaConf.create(dict(values)))
    process = process_settings_of(settings, config, checkouts)
    check_cpu_shim(process)
    raise_problems(shipped_keys(process.release).problems(config))
    for ignored in ignored_keys(MindSpeedView(config)):
        print(f"coca-mindspeed: {ignored}", flush=True)
    check_weights(config, reference=process.reference)
    variables = worker_variables(process, config, environment)
    files = check_inputs(settings, config, files, name_of) if before is None else before.files
    print("coca-mindspeed: environment of Ray's workers:")
    for name, (value, source) in sorted(variables.items()):
        print(f"  {name}={value}  ({source})", flush=True)
    return Training(process, config, variables, files)


def train(
    training: Training,
    task: Callable[[DictConfig], None] = run_mindspeed_rl,
    worker_setup: str = _WORKER_SETUP,
) -> None:
    """Train in the cluster of ``RAY_ADDRESS``, or in one that is started here.

    ``task`` runs MindSpeed-RL's ``train`` in a Ray process; ``worker_setup`` names the function that every other Ray
    process calls first.  Raises TrainingError if a process died.
    """
    set_ray_defaults()
    import ray

    process, config = training.process, training.config
    start_ray(process, config, runtime_environment(process, training.variables, worker_setup))
    try:
        run = ray.remote(_run_task).options(num_cpus=1, max_retries=0)
        ray.get(run.remote(task, config, training.files))
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr)  # with the traceback of the process that failed first
        raise TrainingError(f"training ended: {_cause(error)}{resume_hint(config)}") from error
    finally:
        ray.shutdown()


def _run_task(task: Callable[[DictConfig], None], config: DictConfig, files: Mapping[str, RecordFile]) -> None:
    """Run a task in a process that has the record files of the starting one."""
    take_files(files)
    task(config)


def resume_hint(config: DictConfig) -> str:
    """A hint where to resume from; empty if no checkpoint was written."""
    save = config.actor_config.save
    try:
        saved = newest_iteration(Path(save)) is not None
    except ConfigError:  # killed while the newest iteration was written; older checkpoints may exist
        saved = True
    return f"; resume from the last checkpoint in {save}" if saved else ""


def _cause(error: BaseException) -> str:
    """The innermost error in one line, or its source if it has no message; Ray wraps one around the other."""
    import ray

    traces = str(error)
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = lines[-1:] if isinstance(error, ray.exceptions.RayTaskError) else lines[:6]
    if not summary and (frames := _FRAME.findall(traces)):
        file, line, source = frames[-1]
        summary = [f"{file}, line {line}: {source}"]
    return f"{type(error).__name__}: {' '.join(summary)}"
