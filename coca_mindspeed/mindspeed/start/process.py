"""Prepare a process for the hooked MindSpeed-RL: import paths, the host platform, and the manifest's hooks.

Ray calls :func:`setup_worker` in every worker process before anything else runs there; the driver's task calls
:func:`setup_driver`.
"""

import sys
from collections.abc import Callable
from functools import lru_cache

from coca_mindspeed.mindspeed.hooks import AppliedHooks, apply
from coca_mindspeed.mindspeed.start.settings import ProcessSettings
from coca_mindspeed.upstream.manifest import Manifest, ManifestError, load_manifests


@lru_cache(maxsize=1)
def process_settings() -> ProcessSettings:
    """The settings of this process, read once."""
    return ProcessSettings.from_environment()


def check_rollout_engine(settings: ProcessSettings) -> None:
    """Refuse here, before Ray starts, a rollout engine that its processes would not find.

    Raises:
        CocaError: says what is missing.
    """
    if (settings.coca.platform, settings.coca.rollout_engine) == ("host", "vllm"):
        from coca_mindspeed.mindspeed.host_platform.vllm_cpu import known_vllm

        known_vllm(settings.release)


#: What a Ray worker applies, and what the process in which MindSpeed-RL's ``train`` runs.
WORKER_HOOKS, DRIVER_HOOKS = ("worker", "both"), ("driver", "worker", "both")


def setup_worker() -> None:
    """Hook this Ray worker process."""
    set_up(WORKER_HOOKS)


def setup_driver() -> AppliedHooks:
    """Hook the process in which MindSpeed-RL's ``train`` runs; its actors are exported from here."""
    return set_up(DRIVER_HOOKS)


def set_up(processes: tuple[str, ...], choose: Callable[[Manifest], Manifest] = lambda whole: whole) -> AppliedHooks:
    """Prepare this process, and apply the hooks of ``processes`` in what is chosen of the release's manifest."""
    settings = process_settings()
    # In this order, even where Ray has put some of them on the path already: MindSpeed-RL's folder may hold copies.
    first = [str(path) for path in settings.import_paths]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    if settings.coca.platform == "host":
        from coca_mindspeed.mindspeed import host_platform

        host_platform.install(settings.coca.rollout_engine, settings.release)
    return apply(
        choose(_manifest(settings.release)),
        settings.mindspeed_rl_home,
        processes=processes,
        platform=settings.coca.platform,
        rollout=settings.coca.rollout_engine,
    )


def _manifest(release: str) -> Manifest:
    for manifest in load_manifests():
        if manifest.release == release:
            return manifest
    raise ManifestError(
        f"no manifest for release {release!r} in this process; is another coca_mindspeed installed here?"
    )
