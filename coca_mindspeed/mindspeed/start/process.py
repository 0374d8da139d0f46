"""Prepare a process for the hooked MindSpeed-RL: import paths, the CPU shim, and the hooks of the manifest.

Ray calls :func:`setup_worker` first in every worker process; the driver's task calls :func:`setup_driver`.
"""

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.mindspeed.hooks import apply
from coca_mindspeed.mindspeed.start.settings import CPU_SHIM, ProcessSettings
from coca_mindspeed.upstream.manifest import Manifest, manifest_of

#: Hooks by process: Ray's workers, and the process that runs MindSpeed-RL's ``train``.
WORKER_HOOKS, DRIVER_HOOKS = ("worker", "both"), ("driver", "worker", "both")


@lru_cache(maxsize=1)
def process_settings() -> ProcessSettings:
    """The settings of this process, read once."""
    return ProcessSettings.from_environment()


def check_cpu_shim(settings: ProcessSettings) -> None:
    """Check before Ray starts that ``platform: host`` finds the CPU shim, and its vLLM if it needs one."""
    if settings.coca.platform == "host":
        shim = _cpu_shim(settings)
        if settings.coca.rollout_engine == "vllm":
            shim.vllm_cpu.known_vllm(settings.release)


def _cpu_shim(settings: ProcessSettings) -> Any:
    """The module that runs MindSpeed-RL without an NPU; it belongs to the tests, which are not installed."""
    name = settings.cpu_shim or ""
    try:
        if name:
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
    raise MissingDependencyError(
        f"coca.platform: host needs the repository's CPU shim, which {CPU_SHIM} names, found {name or 'none'}; start "
        "the run by the launch scripts of a clone (docs/port.md, Without an NPU)"
    )


def setup_worker() -> None:
    """Apply the hooks of a Ray worker process."""
    set_up(WORKER_HOOKS)


def setup_driver() -> None:
    """Apply the hooks of the process that runs MindSpeed-RL's ``train``; its actors are exported from here."""
    set_up(DRIVER_HOOKS)


def set_up(processes: tuple[str, ...], choose: Callable[[Manifest], Manifest] = lambda whole: whole) -> None:
    """Prepare this process and apply the hooks of ``processes`` in ``choose(manifest of the release)``."""
    settings = process_settings()
    # Imported before the path changes: the checkouts have a package ``tests`` of their own.
    shim = _cpu_shim(settings) if settings.coca.platform == "host" else None
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
