"""One thing that the doctor looked at."""

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

from coca_mindspeed.utils.cpus import usable_cpus


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing looked at; ``fix`` is empty where it is as wanted."""

    name: str
    found: str
    wanted: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return not self.fix


def finding(name: str, found: str | None, wanted: str, ok: bool, fix: str) -> Diagnosis:
    return Diagnosis(name, found or "nothing", wanted, "" if ok else fix)


@dataclass(frozen=True)
class Machine:
    """This machine; tests make others.

    Attributes:
        environment: variables.
        root: where its file system begins.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    def package_version(self, name: str) -> str | None:
        """Version of an installed Python package, or None."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def npus(self) -> int:
        """Devices that the driver shows."""
        return sum(1 for path in (self.root / "dev").glob("davinci*") if path.name[7:].isdecimal())

    def cpus(self) -> int:
        """CPUs that this process may keep busy."""
        return usable_cpus()

    def free_bytes(self, path: Path) -> int:
        """Room for files of this user at ``path``, or where it would be made."""
        there = path.absolute()
        while not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free

    def architecture(self) -> str:
        """``x86_64`` or ``aarch64``."""
        return platform.machine()

    def open_files(self) -> int:
        """Soft limit of open files."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit

    def open_files_at_most(self) -> int:
        """Hard limit of open files."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit

    def installed(self, *names: str) -> Path | None:
        """The first of these files of Ascend's software that is there, where the launch scripts look for it."""
        folder = self.environment.get("ASCEND_INSTALL_PATH") or str(self.root / "usr" / "local" / "Ascend")
        return next((path for name in names if (path := Path(folder) / name).is_file()), None)

    def jemalloc(self) -> Path | None:
        """The library that the launch scripts preload."""
        folders = (f"usr/lib/{platform.machine()}-linux-gnu", "usr/lib64", "usr/local/lib")
        paths = (self.root / folder / "libjemalloc.so.2" for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def libgomp_of_scikit_learn(self) -> Path | None:
        """The OpenMP library that scikit-learn brings along, if it is installed."""
        folders = (Path(sysconfig.get_path(name)) / "scikit_learn.libs" for name in ("platlib", "purelib"))
        return next((path for folder in folders for path in sorted(folder.glob("libgomp-*.so*"))), None)

    def interfaces(self) -> list[str]:
        """Names of the network interfaces."""
        return [name for _, name in socket.if_nameindex()]

    def driver_version(self) -> str | None:
        """Version of the NPU driver."""
        path = self.root / "usr" / "local" / "Ascend" / "driver" / "version.info"
        return _value(path, r"^Version=(\S+)")

    def cann_home(self) -> Path | None:
        """CANN's folder, as its ``set_env.sh`` says."""
        value = self.environment.get("ASCEND_TOOLKIT_HOME") or self.environment.get("ASCEND_HOME_PATH")
        return Path(value) if value else None

    def cann_version(self) -> str | None:
        """Version of CANN."""
        if (home := self.cann_home()) is None:
            return None
        for path in [*sorted(home.glob("*/ascend_toolkit_install.info")), home / "ascend_toolkit_install.info"]:
            if version := _value(path, r"^version=(\S+)"):
                return version
        return _value(home / "version.cfg", r"^\S*running_version=\[?(?:\d+:)?([^\]\s]+)")


def git_commit(checkout: Path) -> str | None:
    """The commit that a checkout is at, read without running git; None where it is not a repository."""
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
