"""An Ascend machine: versions, devices, limits and paths, read without importing torch_npu, Ray or MindSpeed-RL.

``STACKS`` has the software versions of each supported release of MindSpeed-RL, from its guide and requirements.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coca_mindspeed.utils.limits import memory_limit, usable_cpus
from coca_mindspeed.utils.malloc import find_jemalloc


@dataclass(frozen=True)
class Machine:
    """This machine; ``root`` is the root of its file system."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    def package_version(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def npus(self) -> int:
        """Devices that the driver shows."""
        return sum(1 for path in (self.root / "dev").glob("davinci*") if path.name[7:].isdecimal())

    def cpus(self) -> int:
        return usable_cpus()

    def free_bytes(self, path: Path) -> int:
        """Free bytes at ``path``, or at its nearest existing parent."""
        path = path.absolute()
        return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free

    def memory_bytes(self) -> int | None:
        """Host memory; None if unknown."""
        kib = _value(self.root / "proc" / "meminfo", r"^MemTotal:\s+(\d+) kB")
        return int(kib) * 1024 if kib else None

    def memory_limit(self) -> int | None:
        """Limit of the control group (a container's); None if there is none."""
        return memory_limit(self.root)

    def shared_memory_bytes(self) -> int | None:
        """Size of ``/dev/shm``; None if it does not exist."""
        path = self.root / "dev" / "shm"
        return shutil.disk_usage(path).total if path.is_dir() else None

    def architecture(self) -> str:
        return platform.machine()

    def open_files(self) -> tuple[int, int]:
        """Soft and hard limit of open files."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (2**63 - 1 if limit == resource.RLIM_INFINITY else limit for limit in limits)
        return soft, hard

    def installed(self, *names: str) -> Path | None:
        """The first existing file of these in Ascend's installation folder, as the launch scripts find it."""
        folder = self.environment.get("ASCEND_INSTALL_PATH") or str(self.root / "usr" / "local" / "Ascend")
        return next((path for name in names if (path := Path(folder) / name).is_file()), None)

    def jemalloc(self) -> Path | None:
        """The library that the launch scripts preload."""
        return find_jemalloc(self.root)

    def libgomp_of_scikit_learn(self) -> Path | None:
        """The OpenMP library of the scikit-learn wheel, if installed."""
        folders = (Path(sysconfig.get_path(name)) / "scikit_learn.libs" for name in ("platlib", "purelib"))
        return next((path for folder in folders for path in sorted(folder.glob("libgomp-*.so*"))), None)

    def interfaces(self) -> list[str]:
        return [name for _, name in socket.if_nameindex()]

    def driver_version(self) -> str | None:
        path = self.root / "usr" / "local" / "Ascend" / "driver" / "version.info"
        return _value(path, r"^Version=(\S+)")

    def cann_home(self) -> Path | None:
        """CANN's folder, set by its ``set_env.sh``."""
        value = self.environment.get("ASCEND_TOOLKIT_HOME") or self.environment.get("ASCEND_HOME_PATH")
        return Path(value) if value else None

    def cann_version(self) -> str | None:
        if (home := self.cann_home()) is None:
            return None
        for path in [*sorted(home.glob("*/ascend_toolkit_install.info")), home / "ascend_toolkit_install.info"]:
            if version := _value(path, r"^version=(\S+)"):
                return version
        return _value(home / "version.cfg", r"^\S*running_version=\[?(?:\d+:)?([^\]\s]+)")


def git_commit(checkout: Path) -> str | None:
    """The commit of a checkout, read without running git; None if it is not a repository."""
    git = checkout / ".git"
    try:
        if git.is_file():  # a worktree or submodule points to its own folder
            git = (checkout / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), None)


def megatron_version(checkout: Path) -> str | None:
    """Version of Megatron-core in a checkout, without importing it."""
    path = checkout / "megatron" / "core" / "package_info.py"
    parts = [_value(path, rf"^{name}\s*=\s*(\d+)") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part for part in parts if part) if all(parts) else None


def _value(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


@dataclass(frozen=True, slots=True)
class SoftwareStack:
    """Versions that belong together; ``2.5.1`` includes its builds (:func:`is_version`)."""

    release: str
    driver: str
    cann: str
    megatron: str = "0.12.1"
    # The tested heads of the release branches, and the commits of MindSpeed-RL's guides.
    mindspeed: tuple[str, ...] = ("674226a", "ac9f0e7")
    mindspeed_llm: tuple[str, ...] = ("62d4640", "a2c0733")
    packages: dict[str, str] = field(default_factory=dict)


#: Imported by MindSpeed-RL at start, without a pinned version.
UNPINNED = ("codetiming",)
#: Needed by MindSpeed-LLM's weight converter: for an import, and for transformers' ``device_map``.
CONVERTER = ("peft", "accelerate")

STACKS: dict[str, SoftwareStack] = {
    "2.3.0": SoftwareStack(
        release="2.3.0",
        driver="25.3.0",
        cann="8.5.0",
        packages={
            "torch": "2.5.1",
            "torch_npu": "2.5.1",
            "vllm": "0.9.1",
            "vllm_ascend": "0.9.1",
            "ray": "2.42.1",
            "transformers": "4.52.1",
            "tensordict": "0.1.2",
        },
    ),
    "master": SoftwareStack(
        release="master",
        driver="25.5.0",
        cann="8.5.0",
        packages={
            "torch": "2.7.1",
            "torch_npu": "2.7.1",
            "vllm": "0.11.0",
            "vllm_ascend": "0.11.0",
            "ray": "2.54.0",
            "transformers": "4.57.1",
            "tensordict": "0.8.1",
        },
    ),
}


def is_version(found: str, wanted: str) -> bool:
    """Whether ``found`` is ``wanted`` or a build of it: ``2.5.1.post1`` and ``2.5.1+cpu`` are 2.5.1, 2.5.10 is not."""
    rest = found.removeprefix(wanted)
    return found.startswith(wanted) and not rest[:1].isdecimal()
