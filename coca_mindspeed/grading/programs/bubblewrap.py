"""What the sandbox's file system, namespaces and environment hold, as a command of bubblewrap.

Standard library only.
"""

import os
import sys
import sysconfig
from pathlib import Path

_INSIDE = Path(__file__).with_name("inside")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID")


def sandbox_command(bwrap: str, file_bytes: int) -> list[str]:
    """Bubblewrap's command up to the Python inside.

    Args:
        bwrap: path of bubblewrap.
        file_bytes: size of each of the two file systems that can be written to.
    """
    # As root, bubblewrap mounts as root (the Python may lie in /root) and makes no user namespace, because that
    # would map to root; the harness then gives up root itself, which is why it needs those two capabilities.
    # As anybody else, bubblewrap needs a user namespace and leaves no capabilities.
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
    # The harness is the namespace's first process: nothing inside can signal it, and all ends when it does.
    command += ["--as-pid-1"]
    for directory in ("/usr", "/etc", "/python", "/python/bin"):  # as parents of a mount they would be for root alone
        command += ["--perms", "0755", "--dir", directory]
    command += ["--ro-bind-try", "/usr/lib", "/usr/lib", "--ro-bind-try", "/usr/lib64", "/usr/lib64"]
    for library in ("/lib", "/lib64"):
        if Path(library).is_symlink():
            command += ["--symlink", str(Path(library).readlink()), library]
        else:
            command += ["--ro-bind-try", library, library]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Not its directory: a system's Python lies among the shells.
    command += ["--ro-bind", str(python), f"/python/bin/{python.name}"]
    for name in dict.fromkeys(("lib", sysconfig.get_config_var("platlibdir") or "lib")):
        command += ["--ro-bind-try", str(Path(sys.base_prefix) / name), f"/python/{name}"]
    command += ["--ro-bind", str(_INSIDE), "/inside", "--proc", "/proc", "--dev", "/dev"]
    for directory in ("/tmp", "/dev/shm"):  # inside
        command += ["--perms", "1777", "--size", size, "--tmpfs", directory]
    # Without the first two, the mounts that bubblewrap makes itself could be filled without a limit; by the third, a
    # program could give up its share of the processors (autogroup) and pass for one that the machine starves.
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--remount-ro", "/proc", "--chdir", "/tmp", "--clearenv"]
    for name, value in environment("/tmp", "/python/lib").items():  # inside
        command += ["--setenv", name, value]
    return [*command, "--", f"/python/bin/{python.name}"]


def environment(home: str, libraries: str) -> dict[str, str]:
    """The variables that a harness and its program see.

    Args:
        home: a directory that the program may write to.
        libraries: where the loader looks for the Python's own libraries; empty for the usual places.
    """
    # One thread for numerical libraries: each would start one a core, and threads count as processes.
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        # Each of the C library's arenas reserves 64 MiB of the address space, which is limited; by default there are
        # eight a core.
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": "/python/bin",
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
    }
