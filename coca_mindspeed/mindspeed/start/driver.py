"""Start training: compose the configuration, refuse what cannot work, and run MindSpeed-RL's own ``train``, hooked.

``python -m coca_mindspeed.mindspeed.start.driver CONFIG.yaml [key=value ...]``; the environment names the checkouts:
``MINDSPEED_RL_HOME``, ``MEGATRON_HOME``, ``MINDSPEED_HOME`` and ``MINDSPEED_LLM_HOME``.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.checks import refuse
from coca_mindspeed.errors import CocaError, ConfigError, MissingDependencyError, TrainingError
from coca_mindspeed.mindspeed.hook_checks import check_mindspeed_keys, needs_reference
from coca_mindspeed.mindspeed.stages.verifiers import try_verifier
from coca_mindspeed.mindspeed.start.process import check_rollout_engine, setup_driver
from coca_mindspeed.mindspeed.start.prompt_template import try_template
from coca_mindspeed.mindspeed.start.record_files import check_planned, digests, record_files
from coca_mindspeed.mindspeed.start.settings import VARIABLE, CocaSettings, ProcessSettings, coca_settings
from coca_mindspeed.mindspeed.upstream_keys import ignored_keys, read_upstream_keys
from coca_mindspeed.mindspeed.weights.checkpoints import check_checkpoint, newest_iteration
from coca_mindspeed.upstream.manifest import matching_manifest
from coca_mindspeed.utils.console import print_failure
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

#: Environment variable -> a package that its checkout must hold.
HOMES = {
    "MINDSPEED_RL_HOME": "mindspeed_rl",
    "MEGATRON_HOME": "megatron",
    "MINDSPEED_HOME": "mindspeed",
    "MINDSPEED_LLM_HOME": "mindspeed_llm",
}
# MindSpeed-RL asks for tens of CPUs by name; on the host platform they are only numbers.
_HOST_CPUS = 64
_WORKER_SETUP = "coca_mindspeed.mindspeed.start.process.setup_worker"


def homes(environment: Mapping[str, str]) -> dict[str, Path]:
    """The checkouts that the environment names.

    Raises:
        MissingDependencyError: a variable is not set, or its folder is not a checkout of that project.
    """
    found = {}
    for variable, package in HOMES.items():
        value = environment.get(variable, "")
        if not value:
            raise MissingDependencyError(
                f"{variable} is not set; set it to the checkout that holds {package}/ (docs/port.md)"
            )
        path = Path(value).resolve()
        if not (path / package).is_dir():
            raise MissingDependencyError(
                f"{variable}={value}: expected a checkout with a folder {package}/, found none"
            )
        found[variable] = path
    return found


def compose_config(path: Path, overrides: Sequence[str], mindspeed_rl_home: Path) -> DictConfig:
    """Compose a MindSpeed-RL configuration; its ``defaults`` may name MindSpeed-RL's own groups (``model``).

    Raises:
        ConfigError: the file does not exist or cannot be composed.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    search = f"hydra.searchpath=[file://{mindspeed_rl_home / 'configs'}]"
    try:
        read_yaml(path)  # names the line, which Hydra's own message does not
        with initialize_config_dir(str(path.resolve().parent), version_base=None):
            return compose(path.stem, overrides=[search, *overrides])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, YamlError) as error:
        raise ConfigError(f"{path}: cannot be composed: {error}") from error


def split_config(config: DictConfig) -> tuple[CocaSettings, DictConfig]:
    """Our section, checked, and MindSpeed-RL's configuration without it.

    Raises:
        ConfigError: our section is wrong, or MindSpeed-RL's keys ask for what the hooks do not support.
    """
    section = OmegaConf.to_container(config.get("coca") or OmegaConf.create({}), resolve=True)
    assert isinstance(section, dict)
    settings = _comparable(coca_settings({str(key): value for key, value in section.items()}), config)
    with open_dict(config):
        config.pop("coca", None)
    check_mindspeed_keys(config, settings)
    return settings, config


def _comparable(settings: CocaSettings, config: DictConfig) -> CocaSettings:
    """Without the rollout's log-probabilities where they are of another distribution than the training's.

    vLLM returns them before the temperature is applied, the host platform's own engine after.
    """
    sampling = (config.get("generate_config") or {}).get("sampling_config") or {}
    if settings.rollout_engine == "vllm" and float(sampling.get("temperature", 1.0)) != 1.0:
        return settings.model_copy(update={"rollout_log_probs": False})
    return settings


def for_processes(settings: CocaSettings, config: DictConfig, checkouts: Mapping[str, Path]) -> ProcessSettings:
    """What every Ray process is told; verifies the installation.

    Raises:
        ManifestError: the MindSpeed-RL is not a supported one.
    """
    root = checkouts["MINDSPEED_RL_HOME"]
    # MindSpeed-RL's own guide copies the other three into its folder; what the environment names has to win over
    # those copies.  Of MindSpeed-RL's other folders Python imports cli alone, which none of the others has.
    others = [path for variable, path in checkouts.items() if variable != "MINDSPEED_RL_HOME"]
    return ProcessSettings(
        coca=settings,
        mindspeed_rl_home=root,
        import_paths=(*others, root),
        release=matching_manifest(root).release,
        reference=needs_reference(config),
    )


def runtime_environment(
    process: ProcessSettings, config: DictConfig, worker_setup: str = _WORKER_SETUP
) -> dict[str, Any]:
    """Ray's runtime environment: MindSpeed-RL's own variables, our settings, and what every worker calls first."""
    rl = config.get("rl_config") or {}
    path = process.mindspeed_rl_home / rl.get("runtime_env_path", "configs/envs/runtime_env.yaml")
    variables = (read_yaml(path) or {}).get("env_vars", {})
    generate = config.get("generate_config") or {}
    if generate.get("enable_expert_parallel"):
        variables["VLLM_DP_SIZE"] = str(generate.get("infer_expert_parallel_size"))
    if (buffer := rl.get("hccl_buffersize")) is not None:  # a key of MindSpeed-RL's master
        variables["HCCL_BUFFSIZE"] = str(buffer)
    if process.release == "2.3.0" and not _distribution_is_cut(generate):
        # Its vLLM-Ascend would sort the whole vocabulary at every step for a cut that nobody asks for.
        variables["VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE"] = "0"
    own_package = Path(__file__).resolve().parents[3]
    python_path = [str(own_package), *map(str, process.import_paths), os.environ.get("PYTHONPATH", "")]
    return {
        "env_vars": {
            **{name: str(value) for name, value in variables.items()},
            "IS_MULTIMODAL": "False",
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            VARIABLE: process.model_dump_json(),
        },
        "worker_process_setup_hook": worker_setup,
    }


def _distribution_is_cut(generate: Mapping[str, Any]) -> bool:
    """Whether top-k or top-p is set; MindSpeed-RL's default for ``top_k`` is 50."""
    sampling = generate.get("sampling_config") or {}
    return int(sampling.get("top_k", 50)) > 0 or float(sampling.get("top_p", 1.0)) != 1.0


def try_graders(settings: CocaSettings, config: DictConfig) -> None:
    """Build here what every reward worker will build, and show it every record, before any NPU is held.

    Raises:
        CocaError: this machine lacks something that the graders need, or a record does.
    """
    files = [Path(path) for path in (_data_path(config), settings.eval_data) if path is not None]
    try_verifier(list(config.rl_config.verifier_function), settings.grader, settings.grading, files)


def try_prompts(settings: CocaSettings, config: DictConfig) -> None:
    """Check the chat template's prompts before any NPU is held.

    Raises:
        ConfigError: they cannot be trained on.
    """
    training = {**(config.get("megatron_training") or {}), **(config.get("actor_config") or {})}
    path = training.get("tokenizer_name_or_path")
    if path is not None:
        try_template(Path(path), record_files(_data_path(config), settings.eval_data), settings)


def with_digests(settings: CocaSettings, config: DictConfig) -> CocaSettings:
    """The settings with the digests of this machine's record files, which every other node's are compared with.

    Raises:
        ConfigError: a file has changed since the run was planned.
    """
    found = digests(record_files(_data_path(config), settings.eval_data))
    check_planned(settings.data_sha256, found)
    return settings.model_copy(update={"data_sha256": {**settings.data_sha256, **found}})


def _data_path(config: DictConfig) -> str | None:
    training = {**(config.get("megatron_training") or {}), **(config.get("actor_config") or {})}
    path: str | None = training.get("data_path")
    return path


def check_weights(config: DictConfig, *, reference: bool) -> None:
    """Look for the weights that are named, which Megatron does not: without them it trains from random ones.

    Args:
        config: MindSpeed-RL's.
        reference: whether one is loaded.

    Raises:
        ConfigError: a ``load`` holds no checkpoint, or none with an optimizer's state where that is to be loaded.
    """
    mode = (config.get("rl_config") or {}).get("integrated_mode_config") or {}
    actor = config.get("actor_config") or {}
    named = {"actor_config.load": actor.get("load")}
    if reference:
        named["ref_config.load"] = (config.get("ref_config") or {}).get("load")
        named["rl_config.integrated_mode_config.ref_model_load_path"] = mode.get("ref_model_load_path")
    for key, path in named.items():
        if path is not None:
            try:
                check_checkpoint(Path(path))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
    load = actor.get("load")
    goes_on = actor.get("finetune") is False and actor.get("no_load_optim") is False
    if load is not None and goes_on and newest_iteration(Path(load)) is None:
        raise ConfigError(
            f"actor_config.no_load_optim: false beside finetune: false goes on with a training, and {load} holds "
            "converted weights alone, without an optimizer's state; name the checkpoints of a training"
        )


def start_ray(process: ProcessSettings, config: DictConfig, worker_setup: str = _WORKER_SETUP) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or start one on this machine, whatever else runs there."""
    import ray

    environment = runtime_environment(process, config, worker_setup)
    arguments: dict[str, Any] = {"runtime_env": environment, "log_to_driver": True}
    if not os.environ.get("RAY_ADDRESS"):
        arguments["address"] = "local"
        if process.coca.platform == "host":
            npus = sum(
                int((config.rl_config.get(key) or {}).get("num_npus") or 0)
                for key in ("actor_resource", "reference_resource", "reward_resource")
            )
            arguments |= {"num_cpus": _HOST_CPUS, "resources": {"NPU": npus}, "include_dashboard": False}
    ray.init(**arguments)


def run_mindspeed_rl(config: DictConfig, setup: Callable[[], object] = setup_driver) -> None:
    """MindSpeed-RL's ``train`` in this Ray process, with the hooks in place; its actors are exported from here."""
    setup()
    train_grpo = importlib.import_module("cli.train_grpo")
    train_grpo.train._function(config)


def train(
    path: Path,
    overrides: Sequence[str],
    task: Callable[[DictConfig], None] = run_mindspeed_rl,
    worker_setup: str = _WORKER_SETUP,
) -> None:
    """Train as a configuration file says.

    Args:
        path: of the file.
        overrides: Hydra's.
        task: runs MindSpeed-RL's ``train`` in a Ray process.
        worker_setup: dotted name of what every other Ray process calls first.

    Raises:
        CocaError: before anything starts, if it cannot work; or a process died, naming the cause.
    """
    # Ray reads these when it is imported.  Half a minute is not enough for its start on a busy machine.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    checkouts = homes(os.environ)
    settings, config = split_config(compose_config(path, overrides, checkouts["MINDSPEED_RL_HOME"]))
    process = for_processes(settings, config, checkouts)
    check_rollout_engine(process)
    refuse(read_upstream_keys(process.mindspeed_rl_home).unknown(config))
    for ignored in ignored_keys(config, reference=process.reference):
        print(f"coca-mindspeed: {ignored}", flush=True)
    check_weights(config, reference=process.reference)
    try_graders(settings, config)
    try_prompts(settings, config)
    process = process.model_copy(update={"coca": with_digests(settings, config)})
    start_ray(process, config, worker_setup)
    try:
        ray.get(ray.remote(task).options(num_cpus=1, max_retries=0).remote(config))
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr)  # with the traceback of the process that failed first
        raise TrainingError(f"training ended: {_cause(error)}{_last_checkpoint(config)}") from error
    finally:
        ray.shutdown()


def _last_checkpoint(config: DictConfig) -> str:
    """Where to resume from; nothing where no checkpoint was written."""
    save = config.get("actor_config", {}).get("save")
    try:
        saved = save is not None and newest_iteration(Path(save)) is not None
    except ConfigError:  # killed while it wrote the number of the newest; older checkpoints may be there
        saved = True
    return f"; resume from the last checkpoint in {save}" if saved else ""


def _cause(error: BaseException) -> str:
    """The error that started it, in one line; Ray wraps one around the other."""
    import ray

    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = lines[-1:] if isinstance(error, ray.exceptions.RayTaskError) else lines[:6]
    return f"{type(error).__name__}: {' '.join(summary)}"


def main(arguments: Sequence[str]) -> int:
    """The command line; errors that are meant for the user come without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m coca_mindspeed.mindspeed.start.driver", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parsed = parser.parse_args(arguments)
    try:
        train(parsed.config, parsed.overrides)
    except CocaError as error:
        return print_failure(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
