"""Where figures were measured: processor, cores and the packages that they depend on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    """The processor, its cores that this process may use, PyTorch's threads and the Python."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def load() -> float | None:
    """How many processes wanted a core in the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def packages(*names: str) -> dict[str, str | None]:
    """Installed versions; None: not installed."""
    return {name: _version(name) for name in names}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with family and model: a virtual machine hides which ``AMD EPYC`` it is."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    named = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{name.removeprefix('cpu ')} {facts[name]}" for name in ("cpu family", "model") if name in facts]
    return f"{named} ({', '.join(numbers)})" if numbers else named


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
