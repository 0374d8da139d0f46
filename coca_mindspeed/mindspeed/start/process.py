"""Settings of a run's Ray processes, the section ``coca`` among them, and the preparation of a process by them.

Ray processes receive the settings as JSON in an environment variable, because hooks run before they get an argument.
Ray calls :func:`setup_worker` first in every worker process; the driver's task calls :func:`setup_driver`.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coca_mindspeed.config.values import Day, KeyFacts, TemplateVariables
from coca_mindspeed.errors import ConfigError, MissingDependencyError
from coca_mindspeed.mindspeed.hooks import apply
from coca_mindspeed.scoring.settings import EngineSection, ScoringSettings
from coca_mindspeed.upstream.manifest import Manifest, manifest_of

#: The environment variable that carries :class:`ProcessSettings`.
VARIABLE = "COCA_MINDSPEED_PROCESS"
#: The environment variable that names the module of the CPU shim, for ``platform: host``.
CPU_SHIM = "COCA_MINDSPEED_CPU_SHIM"
#: Logs in ``output_dir``, one row per iteration.
METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"
_FREE = KeyFacts("free")


class HostSettings(EngineSection):
    """Settings for ``platform: host`` only."""

    dtype: Literal["float32", "bfloat16"] = Field("float32", description="weights and activations")
    initial_weights: Path | None = Field(
        None, description="Hugging Face directory of the initial weights; null: random weights"
    )


class CocaSettings(ScoringSettings):
    """The section ``coca``."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict, description="see model.chat_template_kwargs")
    prompt_date: Day = Field(None, description="see model.prompt_date")
    stage: Annotated[int, _FREE] = Field(0, ge=0, description="index of the method's stage; required if it has several")

    nodes: Annotated[int, _FREE] = Field(1, ge=1, description="machines of a file in MindSpeed-RL's layout, as NNODES")
    eval_data: Annotated[Path | None, _FREE] = Field(
        None, description="held-out records (JSON Lines) for validation; null: none"
    )
    eval_interval: Annotated[int, _FREE] = Field(0, ge=0, description="iterations between validations; 0: none")
    samples_interval: Annotated[int, _FREE] = Field(0, ge=0, description="iterations between sample dumps; 0: none")
    samples_prompts: Annotated[int, _FREE] = Field(2, ge=1, description="prompts per dump, with all responses")
    output_dir: Annotated[Path | None, _FREE] = Field(None, description="directory of samples and validation results")
    data_sha256: Annotated[dict[str, str], _FREE] = Field(
        {}, description="SHA-256 of record files by path, which a resumed run must share"
    )
    npu_memory_gib: Annotated[float | None, _FREE] = Field(
        None, gt=0, description="see hardware.memory_gib; tells on which NPUs metrics were measured"
    )
    keep_checkpoints: Annotated[int | None, _FREE] = Field(None, ge=1, description="newest checkpoints kept; null: all")
    checkpoint_minutes: Annotated[float | None, _FREE] = Field(None, gt=0, description="see checkpoint.minutes")
    metrics_file: Annotated[bool, _FREE] = Field(True, description="write output_dir/metrics.jsonl")

    rollout_log_probs: Annotated[bool, _FREE] = Field(
        True,
        description="keep the rollout's log-probs: for their gap to training's, method.entropy_bonus and the weights",
    )
    rollout_is_threshold: float | None = Field(
        None, gt=0, description="truncated importance weights against the rollout's log-probs; null: none"
    )
    stall_timeout: Annotated[float, _FREE] = Field(
        3600.0, gt=0, description="seconds without progress until a stage fails"
    )

    platform: Literal["npu", "host"] = Field("npu", description="npu, or host (CPU)")
    rollout: Annotated[Literal["auto", "vllm", "transformers"], _FREE] = Field(
        "auto", description="rollout engine; auto: vllm on npu, transformers on host (vllm there: its CPU build)"
    )
    host: Annotated[HostSettings, _FREE] = HostSettings()

    @property
    def validation_interval(self) -> int:
        """Iterations between validations; 0: none, as without held-out records."""
        return 0 if self.eval_data is None else self.eval_interval

    @property
    def rollout_engine(self) -> str:
        """``vllm`` or ``transformers``."""
        if self.rollout != "auto":
            return self.rollout
        return "vllm" if self.platform == "npu" else "transformers"

    @model_validator(mode="after")
    def _consistent(self) -> "CocaSettings":
        self.method.checked_stage(self.stage if "stage" in self.model_fields_set else None)
        if (self.validation_interval or self.samples_interval) and self.output_dir is None:
            raise ValueError("output_dir: validation and samples need somewhere to be written to, found null")
        if self.platform == "npu" and self.rollout_engine != "vllm":
            raise ValueError(f"rollout: on platform npu responses come from vllm, found {self.rollout}")
        return self


class ProcessSettings(EngineSection):
    """Settings that every Ray process reads before it imports MindSpeed-RL."""

    coca: CocaSettings
    mindspeed_rl_home: Path
    import_paths: tuple[Path, ...]
    release: str
    reference: bool = Field(description="whether a KL term, and so a reference model, is asked for")
    max_new_tokens: int | None = Field(None, description="of a response; null: unknown")
    cpu_shim: str | None = Field(None, description="module that stands in for NPUs")

    @classmethod
    def from_environment(cls) -> "ProcessSettings":
        """Read the settings of this process, which this project's driver has set."""
        if VARIABLE not in os.environ:
            raise ConfigError(f"{VARIABLE} is not set: start training with coca-mindspeed, not with MindSpeed-RL's cli")
        return cls.model_validate_json(os.environ[VARIABLE])


#: Hooks by process: Ray's workers, and the process that runs MindSpeed-RL's ``train``.
WORKER_HOOKS, DRIVER_HOOKS = ("worker", "both"), ("driver", "worker", "both")


@lru_cache(maxsize=1)
def process_settings() -> ProcessSettings:
    """The settings of this process, read once."""
    return ProcessSettings.from_environment()


def check_cpu_shim(settings: ProcessSettings) -> None:
    """Check before Ray starts that ``platform: host`` finds the CPU shim, and its vLLM if it needs one."""
    if settings.coca.platform == "host":
        shim = cpu_shim(settings.cpu_shim)
        if settings.coca.rollout_engine == "vllm":
            shim.vllm_cpu.known_vllm(settings.release)


def cpu_shim(name: str | None) -> Any:
    """Import the module that runs MindSpeed-RL without an NPU, which :data:`CPU_SHIM` names.

    Raises MissingDependencyError without it: it belongs to the tests, which are not installed.
    """
    try:
        if name:
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not str(name).startswith(error.name):
            raise
    raise MissingDependencyError(
        f"coca.platform: host needs the repository's CPU shim, which {CPU_SHIM} names, found {name or 'none'}; start "
        "the run by the launch scripts of a clone (docs/port.md, Without an NPU)"
    )


def setup_worker() -> None:
    """Apply the hooks of a Ray worker process."""
    set_up(WORKER_HOOKS)


def setup_driver() -> None:
    """Apply the hooks of the process that runs MindSpeed-RL's ``train``."""
    set_up(DRIVER_HOOKS)


def set_up(processes: tuple[str, ...], choose: Callable[[Manifest], Manifest] = lambda whole: whole) -> None:
    """Prepare this process and apply the hooks of ``processes`` in ``choose(manifest of the release)``."""
    settings = process_settings()
    # Imported before the path changes: the checkouts have a package ``tests`` of their own.
    shim = cpu_shim(settings.cpu_shim) if settings.coca.platform == "host" else None
    # In this order, even where Ray has put some of them on the path already: MindSpeed-RL's folder may hold copies.
    first = [str(path) for path in settings.import_paths]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    if shim is not None:
        shim.install(settings.coca.rollout_engine, settings.release)
    apply(
        choose(manifest_of(settings.release)),
        settings.mindspeed_rl_home,
        processes=processes,
        platform=settings.coca.platform,
        rollout=settings.coca.rollout_engine,
    )
