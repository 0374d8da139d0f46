"""The bubblewrap command: file system, namespaces and environment of the sandbox. Standard library only."""

import fcntl
import os
import random
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coca_mindspeed.errors import GradingError

_INSIDE = Path(__file__).with_name("inside")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID")


def sandbox_command(bwrap: str, file_bytes: int) -> list[str]:
    """Bubblewrap's command up to the Python inside.

    Args:
        bwrap: path of bubblewrap.
        file_bytes: size of each of the two writable file systems.
    """
    # As root, bubblewrap mounts as root (Python may be in /root) and makes no user namespace, which would map to root;
    # the harness then drops root, for which it needs two capabilities. Other users need a user namespace.
    root = os.geteuid() == 0
    user = (
        ["--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name))]
        if root
        else ["--unshare-user"]
    )
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    size = str(file_bytes)
    command = [bwrap, *user, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    # As the namespace's first process the harness cannot be signalled from inside, and all ends with it.
    command += ["--as-pid-1"]
    for directory in ("/usr", "/etc", "/python", "/python/bin"):  # parents of a mount would be root's
        command += ["--perms", "0755", "--dir", directory]
    command += ["--ro-bind-try", "/usr/lib", "/usr/lib", "--ro-bind-try", "/usr/lib64", "/usr/lib64"]
    for library in ("/lib", "/lib64"):
        if Path(library).is_symlink():
            command += ["--symlink", str(Path(library).readlink()), library]
        else:
            command += ["--ro-bind-try", library, library]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Not its directory, which may hold other programs of the system.
    command += ["--ro-bind", str(python), f"/python/bin/{python.name}"]
    for name in dict.fromkeys(("lib", sysconfig.get_config_var("platlibdir") or "lib")):
        command += ["--ro-bind-try", str(Path(sys.base_prefix) / name), f"/python/{name}"]
    command += ["--ro-bind", str(_INSIDE), "/inside", "--proc", "/proc", "--dev", "/dev"]
    for directory in ("/tmp", "/dev/shm"):  # inside
        command += ["--perms", "1777", "--size", size, "--tmpfs", directory]
    # The first two could be filled without a limit; through the third, a program could lower its share of the
    # processors (autogroup) and appear starved.
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--remount-ro", "/proc", "--chdir", "/tmp", "--clearenv"]
    for name, value in environment("/tmp", "/python/lib").items():  # inside
        command += ["--setenv", name, value]
    return [*command, "--", f"/python/bin/{python.name}"]


def environment(home: str, libraries: str) -> dict[str, str]:
    """The environment variables of a harness and its program.

    Args:
        home: a writable directory.
        libraries: search path for Python's own libraries; empty for the default.
    """
    # One thread for numerical libraries: threads count as processes.
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        # Each arena reserves 64 MiB of the limited address space; by default there are eight per core.
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": "/python/bin",
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
    }


# Ranges that systemd leaves unused. The first is so wide that containers without common locks rarely draw the same id;
# it may not be mapped in a user namespace.
_RANGES = ((1_900_000_000, 4_096), (60_578, 606))
_ATTEMPTS = 1_000


@contextmanager
def locked_user_id() -> Iterator[tuple[int, int]]:
    """A free user id and the descriptor of its lock, which is held until all that inherit it have ended.

    Raises:
        GradingError: no id is free.
    """
    first, count = next(((first, count) for first, count in _RANGES if _mapped(first, count)), _RANGES[-1])
    directory = _lock_directory()
    for _ in range(_ATTEMPTS):
        uid = first + random.randrange(count)
        descriptor = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            yield uid, descriptor
            return
        finally:
            os.close(descriptor)
    raise GradingError(f"every user id that was tried is in use by another sandbox; see the locks in {directory}")


def _mapped(first: int, count: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = map(int, line.split())
        if inside <= first and first + count <= inside + length:
            return True
    return False


def _lock_directory() -> Path:
    for parent in (Path("/run"), Path(tempfile.gettempdir())):
        directory = parent / "coca-mindspeed-user-ids"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        found = directory.lstat()
        # In /tmp another user may have been there first.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022:
            return directory
    raise GradingError(f"no directory for the locks of user ids: neither /run nor {tempfile.gettempdir()} can be used")
