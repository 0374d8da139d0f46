"""A sandbox for programs written by a model: bubblewrap around the harness of :mod:`.inside`.

No network, no files of the host but Python, a user that is not root, and limits on time, memory, processes, files and
output. Standard library only.
"""

import compileall
import errno
import fcntl
import json
import os
import random
import resource
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coca_sandbox.inside import process as processes
from coca_sandbox.inside.process import STARVED, UNAVAILABLE, UNGRADABLE, WALL_FACTOR, WRONG, Report

_INSIDE = Path(__file__).with_name("inside")
_MAX_REPORT_BYTES = 1 << 20
_TICK_SECONDS = 0.05
START_SECONDS = 30.0  # for the sandbox and its first interpreter; not charged to the program
GRACE_SECONDS = 5.0  # after the wall time limit, which the harness enforces first
_TEARDOWN_SECONDS = 5.0
ATTEMPTS, PAUSE_SECONDS = 4, 0.25  # to start a sandbox when no process is available
_STARVED_ATTEMPTS = 2  # of a program that got too little processor time
_UNAVAILABLE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_SOCKET_BYTES = 256 << 10  # kernel memory for a socket's unread data, which no limit of the process counts
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID")
# Ranges that systemd leaves unused. The first is so wide that containers without common locks rarely draw the same id;
# it may not be mapped in a user namespace.
UID_RANGES = ((1_900_000_000, 4_096), (60_578, 606))
_USER_ID_ATTEMPTS = 1_000


class SandboxError(Exception):
    """There is no sandbox, or no user id for one."""


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int = 1 << 30  # address space of each process, and resident memory of all of them together
    processes: int = 32  # processes and threads at one time
    file_bytes: int = 32 << 20  # size of one file, and of everything in /tmp together
    open_files: int = 128  # descriptors of each process
    files: int = 4_096  # in each writable file system, with directories; checked 20 times a second


@dataclass(slots=True)
class Sandbox:
    """Runs jobs; thread-safe. Raises ``SandboxError`` if bubblewrap does not work.

    Args:
        limits: of one job.
        allow_unsandboxed: without a working bubblewrap, run the harness as an ordinary process of this user, which can
            read and write all of this user's files. Resource and time limits still hold.
    """

    limits: Limits = field(default_factory=Limits)
    allow_unsandboxed: bool = False
    command_prefix: list[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        problem = self._start_problem()
        if problem and not self.allow_unsandboxed:
            raise SandboxError(
                f"programs written by a model need a sandbox, and there is none: {problem}. Install bubblewrap "
                "0.8 or newer (Debian and Ubuntu: apt-get install bubblewrap) where user namespaces are allowed (in a "
                "container: --privileged), or accept the risk with the grader's option allow_unsandboxed "
                "(data.grader_options.code.allow_unsandboxed=true)"
            )

    @property
    def sandboxed(self) -> bool:
        return self.command_prefix is not None

    def run(self, job: Mapping[str, Any], total_seconds: float, stop: threading.Event | None = None) -> Report:
        """Run one job of the harness.

        Args:
            job: ``kind``, ``source`` and the fields of that kind; see :mod:`.inside.jobs`.
            total_seconds: limit as ``inside/process.py`` counts; ``WALL_FACTOR`` times that is the limit in wall time.
            stop: ends the job early, as ungradable, when it is set.
        """
        if 0 <= (cpu_limit := resource.getrlimit(resource.RLIMIT_CPU)[1]) <= total_seconds:
            problem = f"the inherited limit on processor time (ulimit -t {cpu_limit}) is below a program's, "
            return Report(UNGRADABLE, f"{problem}{total_seconds:g} s")
        stop = stop or threading.Event()
        problem, starved = "", 0
        for attempt in range(ATTEMPTS):
            if attempt:
                stop.wait(PAUSE_SECONDS * 2**attempt)
            if stop.is_set():
                return Report(UNGRADABLE, "grading was stopped")
            try:
                report = self.run_once(job, total_seconds, stop)
            except OSError as error:
                if error.errno not in _UNAVAILABLE:
                    raise
                report = Report(UNAVAILABLE, f"the sandbox does not start: {error}")
            if report.outcome not in (UNAVAILABLE, STARVED):
                return report
            problem = report.reason
            starved += report.outcome == STARVED
            if starved == _STARVED_ATTEMPTS:
                return Report(UNGRADABLE, problem, timed_out=True)
        return Report(UNGRADABLE, f"no sandbox could be started: {problem}")

    def run_once(self, job: Mapping[str, Any], total_seconds: float, stop: threading.Event) -> Report:
        token = secrets.token_hex(16)
        with self._command() as (command, scratch), self._user() as (uid, lock):
            limits = {
                **asdict(self.limits),
                "uid": uid,
                "processes": self._process_limit(),
                "cpu_seconds": total_seconds + 1,
                "alone": self.sandboxed,
            }
            content = {**job, "total_seconds": total_seconds, "token": token, "limits": limits, "scratch": scratch}
            data = json.dumps(content).encode("ascii") + b"\n"
            pipes, failure = self._communicate(command, lock, data, total_seconds, stop)
        if stop.is_set():
            return Report(UNGRADABLE, "grading was stopped")
        why = pipes.errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        messages = _messages(bytes(pipes.output), token)
        if not any(message.pop("ready", False) for message in messages):
            # The program has not run yet.
            return Report(UNAVAILABLE, failure.reason if failure else why or "the harness ended at once")
        last = messages[-1]
        if failure and not (failure.timed_out and last):  # a verdict in time may be read late
            return failure
        if not last:
            return Report(WRONG, f"the tests did not come to their end{': ' if why else ''}{why}")
        return Report(**{**last, "outputs": tuple(last["outputs"])})

    @contextmanager
    def _user(self) -> Iterator[tuple[int | None, list[int]]]:
        if self.sandboxed and os.geteuid() == 0:
            with locked_user_id() as (uid, lock):
                yield uid, [lock]
        else:
            yield None, []

    def _process_limit(self) -> int | None:
        # As root, each sandbox has a user of its own. Otherwise the kernel counts per user namespace since Linux 5.14,
        # before that all processes and threads of the user.
        if os.geteuid() == 0:
            return self.limits.processes if self.sandboxed else None
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if self.sandboxed and release >= (5, 14):
            return self.limits.processes
        return self.limits.processes + _threads_of_user(os.getuid())

    def _start_problem(self) -> str:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return "bwrap is not installed"
        options = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout
        if "--size" not in options:
            return f"{bwrap} is too old to limit the size of a file system"
        # Two interpreters start for every program.
        compileall.compile_dir(str(_INSIDE), quiet=2)
        self.command_prefix = sandbox_command(bwrap, self.limits.file_bytes)
        probe = {"kind": "stdio", "source": "print(6 * 7)", "cases": [{"input": "", "output": "42"}], "seconds": 10.0}
        report = self.run(probe, total_seconds=10.0)
        if report.outcome == "right":
            return ""
        self.command_prefix = None
        return f"a first program did not run in it ({report.reason})"

    @contextmanager
    def _command(self) -> Iterator[tuple[list[str], str]]:
        options = ["-I", "-S", "-B", "-X", "utf8"]
        if self.command_prefix is not None:
            yield [*self.command_prefix, *options, "/inside/harness.py"], "/tmp"  # inside
            return
        with tempfile.TemporaryDirectory(prefix="unsandboxed-", ignore_cleanup_errors=True) as scratch:
            yield [sys.executable, *options, str(_INSIDE / "harness.py")], scratch

    def _harness_sleeps(self, process: int) -> bool:
        with suppress(OSError, ValueError, IndexError):
            harness = _children(process)[0] if self.sandboxed else process
            return Path(f"/proc/{harness}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        return False

    def _communicate(
        self, command: list[str], inherited: list[int], data: bytes, seconds: float, stop: threading.Event
    ) -> tuple[processes.Pipes, Report | None]:
        """Return the harness's output, and the reason why it was killed or None.

        Standard input stays open: the harness ends when it is closed. Its first output line says that it is ready; the
        job's time starts then.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={} if self.sandboxed else environment(tempfile.gettempdir(), ""),
            start_new_session=True,
            pass_fds=inherited,
        )
        assert process.stdin is not None
        processes.hold(process.stdin)
        pipes, failure = processes.Pipes(process, data), None
        ready, deadline = False, time.monotonic() + START_SECONDS
        try:
            while pipes.open and not failure and not stop.is_set():
                moved = pipes.move(lambda reading, writing: processes.poll(reading, writing, _TICK_SECONDS))
                if not ready and b"\n" in pipes.output:
                    ready, deadline = True, time.monotonic() + WALL_FACTOR * seconds + GRACE_SECONDS
                if max(len(pipes.output), len(pipes.errors)) > _MAX_REPORT_BYTES:
                    failure = Report(WRONG, "wrote too much")
                elif time.monotonic() > deadline:
                    late = f"took longer than {seconds:g} s"
                    late = late if ready else f"the sandbox did not start within {START_SECONDS:g} s"
                    # A sleeping harness waits for its tests; a running one would have reported by now.
                    starved = ready and not self._harness_sleeps(process.pid)
                    failure = Report(STARVED if starved else WRONG, late, timed_out=ready)
                elif not any(moved) and _memory_bytes(process.pid, self.sandboxed) > self.limits.memory_bytes:
                    failure = Report(WRONG, "used too much memory")
        finally:
            _kill(process)
            pipes.close()
        return pipes, failure


def _messages(output: bytes, token: str) -> list[dict[str, Any]]:
    """The output lines with the token, which only the harness can write."""
    messages = []
    for line in output.splitlines():
        try:
            message = json.loads(line)
            if secrets.compare_digest(message.pop("token"), token):
                messages.append(message)
        except (ValueError, KeyError, TypeError):
            continue
    return messages


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the command and everything that it started, and wait.

    The first process inside is killed before bubblewrap, which then waits for the whole namespace. Otherwise the next
    program of the same user might find its processes counted.
    """
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        process.wait(_TEARDOWN_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _memory_bytes(root: int, sandboxed: bool) -> int:
    """Resident memory of a process and its descendants, shared pages counted for each, and of the sandbox's sockets."""
    total, pending = 0, [root]
    while pending:
        process = Path("/proc") / str(pending.pop())
        with suppress(OSError, ValueError, IndexError):  # it has just ended
            total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for children in process.glob("task/*/children"):
                pending += map(int, children.read_text().split())
    with suppress(OSError, ValueError, IndexError):
        for child in _children(root) if sandboxed else ():
            total += _SOCKET_BYTES * int(Path(f"/proc/{child}/net/sockstat").read_text().split()[2])
    return total


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _threads_of_user(uid: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == uid:
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:
            continue
    return count


def sandbox_command(bwrap: str, file_bytes: int) -> list[str]:
    """Bubblewrap's command up to the Python inside; ``file_bytes`` limits each of two writable file systems."""
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
    """The environment variables of a harness and its program; ``libraries`` is for Python's own, or empty."""
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


@contextmanager
def locked_user_id() -> Iterator[tuple[int, int]]:
    """A free user id and the descriptor of its lock, held until all that inherit it have ended."""
    first, count = next(((first, count) for first, count in UID_RANGES if _mapped(first, count)), UID_RANGES[-1])
    directory = _lock_directory()
    for _ in range(_USER_ID_ATTEMPTS):
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
    raise SandboxError(f"every user id that was tried is in use by another sandbox; see the locks in {directory}")


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
    raise SandboxError(f"no directory for the locks of user ids: neither /run nor {tempfile.gettempdir()} can be used")
