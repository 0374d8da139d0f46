"""A sandbox for programs that a model wrote: bubblewrap around the harness of :mod:`coca_mindspeed.grading.inside`.

No network, a file system that holds a Python and nothing of the host's, a user that is not root, limits on time,
memory, processes, files and output.  Standard library only, so that any Python can use and test it.
"""

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import GradingError

_INSIDE = Path(__file__).with_name("inside")
_MAX_REPORT_BYTES = 1 << 16
_TICK_SECONDS = 0.05
# For starting the sandbox and two interpreters on a busy machine; a program's own time is counted inside.
_GRACE_SECONDS = 5.0
_TEARDOWN_SECONDS = 5.0

# Below the overflow id 65534 and above the ids that systemd gives to services: nobody else's.
_FIRST_UID, _UIDS = 65520, 14


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        memory_bytes: address space of each process, and resident memory of all of them together.
        processes: processes and threads at one time.
        file_bytes: size of one file, and of everything in ``/tmp`` together.
        open_files: descriptors of each process.
    """

    memory_bytes: int = 1 << 30
    processes: int = 32
    file_bytes: int = 32 << 20
    open_files: int = 128


@dataclass(frozen=True, slots=True)
class Report:
    """How a job went: ``outcome`` is ``right``, ``wrong`` or ``ungradable``."""

    outcome: str
    reason: str


@dataclass(slots=True)
class Sandbox:
    """Runs jobs, one at a time for each ``slot``; several threads may use different slots.

    Args:
        limits: what one job may use.
        allow_unsandboxed: run the harness as an ordinary process of this user where bubblewrap does not work.  The
            program can then read and write what this user can.  Resource limits and the time limit still hold.

    Raises:
        GradingError: there is no working sandbox, and running without one was not allowed.
    """

    limits: Limits = field(default_factory=Limits)
    allow_unsandboxed: bool = False
    _prefix: list[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        problem = self._start_problem()
        if problem and not self.allow_unsandboxed:
            raise GradingError(
                f"programs that a model wrote run only in a sandbox, and there is none: {problem}. Install bubblewrap "
                "0.8 or newer (Debian and Ubuntu: apt-get install bubblewrap) where user namespaces are allowed (in a "
                "container: --privileged), or accept the risk with allow_unsandboxed: true"
            )

    @property
    def sandboxed(self) -> bool:
        return self._prefix is not None

    def run(self, job: Mapping[str, Any], total_seconds: float, slot: int = 0) -> Report:
        """Run one job of the harness.

        Args:
            job: ``kind``, ``source`` and what that kind needs; see :mod:`.programs`.
            total_seconds: limit for all of it, in wall time; enforced from outside as well.
            slot: which of the concurrent places this is.  As root, every slot has a user id of its own.
        """
        token = secrets.token_hex(16)
        with self._command(slot) as (command, scratch):
            limits = {
                "uid": _FIRST_UID + slot % _UIDS if self.sandboxed and os.geteuid() == 0 else None,
                "memory_bytes": self.limits.memory_bytes,
                "file_bytes": self.limits.file_bytes,
                "open_files": self.limits.open_files,
                "processes": self._process_limit(),
                "cpu_seconds": total_seconds + 1,
                "filter_calls": self.sandboxed,
            }
            content = {**job, "total_seconds": total_seconds, "token": token, "limits": limits, "scratch": scratch}
            output, errors, killed = self._communicate(
                command, json.dumps(content).encode("ascii"), total_seconds + _GRACE_SECONDS
            )
        if killed:
            return Report("wrong", killed)
        try:
            said = json.loads(output)
            if not secrets.compare_digest(said["token"], token):
                raise ValueError("another token")
            return Report(said["outcome"], said["reason"])
        except (ValueError, KeyError, TypeError):
            why = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return Report("wrong", f"the tests did not come to their end{': ' if why else ''}{why}")

    def _process_limit(self) -> int | None:
        # Since Linux 5.14 the sandbox's own user namespace counts; before, all processes of the user do, this one's
        # threads included.  As root every slot has a user of its own, which has no other processes.
        if os.geteuid() == 0:
            return self.limits.processes if self.sandboxed else None
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if self.sandboxed and release >= (5, 14):
            return self.limits.processes
        return self.limits.processes + _threads_of_user(os.getuid())

    def _start_problem(self) -> str:
        """Try the sandbox out, and say why it does not work, or ``""``."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return "bwrap is not installed"
        options = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout
        if "--size" not in options:
            return f"{bwrap} is too old to limit the size of a file system"
        self._prefix = self._bubblewrap(bwrap)
        probe = {"kind": "stdio", "source": "print(6 * 7)", "cases": [{"input": "", "output": "42"}], "seconds": 10.0}
        report = self.run(probe, total_seconds=10.0)
        if report.outcome == "right":
            return ""
        self._prefix = None
        return f"a first program did not run in it ({report.reason})"

    def _bubblewrap(self, bwrap: str) -> list[str]:
        """Bubblewrap's command up to the Python inside."""
        # As root, bubblewrap mounts as root (the Python may lie in /root) and makes no user namespace, because that
        # would map to root; the harness then gives up root itself, which is why it needs those two capabilities.
        # As anybody else, bubblewrap needs a user namespace and leaves no capabilities.
        root = os.geteuid() == 0
        user = (
            ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
        )
        python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        size = str(self.limits.file_bytes)
        command = [bwrap, *user, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        # The harness is the namespace's first process: nothing inside can signal it, and all ends when it does.
        command += ["--as-pid-1"]
        for directory in ("/usr", "/etc", "/python"):  # as parents of a mount they would be for root alone
            command += ["--perms", "0755", "--dir", directory]
        command += ["--ro-bind-try", "/usr/lib", "/usr/lib", "--ro-bind-try", "/usr/lib64", "/usr/lib64"]
        for library in ("/lib", "/lib64"):
            if Path(library).is_symlink():
                command += ["--symlink", str(Path(library).readlink()), library]
            else:
                command += ["--ro-bind-try", library, library]
        command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        command += ["--ro-bind", str(python.parent), "/python/bin"]
        for name in dict.fromkeys(("lib", sysconfig.get_config_var("platlibdir") or "lib")):
            command += ["--ro-bind-try", str(Path(sys.base_prefix) / name), f"/python/{name}"]
        command += ["--ro-bind", str(_INSIDE), "/inside", "--proc", "/proc", "--dev", "/dev"]
        for directory in ("/tmp", "/dev/shm"):  # inside
            command += ["--perms", "1777", "--size", size, "--tmpfs", directory]
        # Without these two, the mounts that bubblewrap makes itself could be filled without a limit.
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
        for name, value in _environment("/tmp", "/python/lib").items():  # inside
            command += ["--setenv", name, value]
        return [*command, "--", f"/python/bin/{python.name}"]

    @contextmanager
    def _command(self, slot: int) -> Iterator[tuple[list[str], str]]:
        options = ["-I", "-S", "-B", "-X", "utf8"]
        if self._prefix is not None:
            yield [*self._prefix, *options, "/inside/harness.py"], "/tmp"  # inside
            return
        with tempfile.TemporaryDirectory(prefix=f"unsandboxed-{slot}-", ignore_cleanup_errors=True) as scratch:
            yield [sys.executable, *options, str(_INSIDE / "harness.py")], scratch

    def _communicate(self, command: list[str], data: bytes, seconds: float) -> tuple[bytes, bytes, str]:
        """Output, error output, and why the job was killed or ``""``."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={} if self.sandboxed else _environment(tempfile.gettempdir(), ""),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stdin, stdout, stderr = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
        os.set_blocking(stdin, False)
        received = {stdout: bytearray(), stderr: bytearray()}
        unsent, writing, killed = memoryview(data), [stdin], ""
        deadline = time.monotonic() + seconds
        open_pipes = [stdout, stderr]
        try:
            while open_pipes and not killed:
                readable, writable, _ = select.select(open_pipes, writing, [], _TICK_SECONDS)
                for descriptor in readable:
                    chunk = os.read(descriptor, 1 << 16)
                    if not chunk:
                        open_pipes.remove(descriptor)
                    received[descriptor] += chunk
                for descriptor in writable:
                    try:
                        unsent = unsent[os.write(descriptor, unsent[: 1 << 20]) :]
                    except BrokenPipeError:
                        unsent = unsent[len(unsent) :]
                if writing and not unsent:
                    process.stdin.close()
                    writing = []
                if max(map(len, received.values())) > _MAX_REPORT_BYTES:
                    killed = "wrote too much"
                elif time.monotonic() > deadline:
                    killed = f"took longer than {seconds - _GRACE_SECONDS:g} s"
                elif not readable and not writable and _resident_bytes(process.pid) > self.limits.memory_bytes:
                    killed = "used too much memory"
        finally:
            _kill(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
        return bytes(received[stdout]), bytes(received[stderr]), killed


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End everything that the command started, and wait until it is gone.

    The first process inside goes before bubblewrap, which then waits until the whole namespace is gone.  The other way
    round that would happen some time later, and the next program of the same user would find its processes counted.
    """
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for child in map(int, children.split()):
            os.kill(child, signal.SIGKILL)
        process.wait(_TEARDOWN_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _environment(home: str, libraries: str) -> dict[str, str]:
    # One thread for numerical libraries: each would start one a core, and threads count as processes.
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": "/python/bin",
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
    }


def _resident_bytes(root: int) -> int:
    """Resident memory of a process and all of its descendants; pages that they share count for each."""
    total, pending = 0, [root]
    while pending:
        process = Path("/proc") / str(pending.pop())
        try:
            total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for children in process.glob("task/*/children"):
                pending += map(int, children.read_text().split())
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return total


def _threads_of_user(uid: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == uid:
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:
            continue
    return count
