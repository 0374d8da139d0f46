"""Processes: a watchdog for the parent's death, limits, pipes, and the clock of a program's time.

A process that must not outlive its parent inherits the reading end of a pipe whose writing end the parent holds
(:func:`hold`), and calls :func:`end_with_writer`.

A program is not charged for waiting for a processor. :class:`Clock` samples the process tree 20 times a second and
charges for each interval

- the processor time of all processes, if a thread was runnable throughout the interval: it got all the machine had;
- else the wall time, or the processor time if that is more, because several processors were used.

A thread was runnable throughout if it is runnable at both ends and its kernel count of voluntary context switches has
not changed; short sleeps therefore count as sleep. Calls that yield the processor without being counted are filtered
(see ``seccomp.py``).
"""

import ctypes
import errno
import fcntl
import functools
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

# Wall time limit of a program, as a multiple of its limit; beyond it the machine is too busy.
WALL_FACTOR = 10.0
_INTERVAL_SECONDS = 0.045
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SWITCHES = b"\nvoluntary_ctxt_switches:"
_TICK_SECONDS = 0.05
_held: WeakSet["_Writer"] = WeakSet()
_file_limits: dict[str, int] = {}

RIGHT, WRONG, UNGRADABLE = "right", "wrong", "ungradable"
UNAVAILABLE, STARVED = "unavailable", "starved"  # no process, or too little processor time: may be tried again


class Report(NamedTuple):
    """The result of a job."""

    outcome: str
    reason: str = ""
    timed_out: bool = False
    outputs: tuple[str | None, ...] = ()  # of a job of the kind "outputs": a digest for each input; None equals nothing


class JobError(Exception):
    """The job cannot go on: by the program's fault (``WRONG``), the tests' (``UNGRADABLE``) or the machine's."""

    def __init__(self, outcome: str, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.outcome, self.timed_out = outcome, timed_out


class _Writer(Protocol):
    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


def hold(writer: _Writer) -> None:
    """Register the writing end of a watchdog's pipe: forked children of this process get ``/dev/null`` in its place."""
    _held.add(writer)


def _release_in_child() -> None:
    descriptors = [writer.fileno() for writer in _held if not writer.closed]
    _held.clear()
    if not descriptors:
        return
    # Replaced, not closed: the Python object that owns the number closes it later.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_release_in_child)


def end_with_writer(descriptor: int) -> None:
    """Have the kernel end this process when the last writer of a pipe is gone; nothing may be written to the pipe.

    The signal handler is the C library's ``_exit``: a Python handler or a thread would wait for the interpreter, which
    may be busy with ``9**9**9``. A parent-death signal is not enough: it may lack the permission to signal another
    user, and it is bound to a thread of the parent.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGIO, ctypes.cast(libc._exit, ctypes.c_void_p))
    _watch(descriptor)


def end_group_with_writer(descriptor: int) -> None:
    """Like :func:`end_with_writer`, for the whole process group; may wait for the interpreter."""
    signal.signal(signal.SIGIO, lambda *_: os.killpg(0, signal.SIGKILL))
    _watch(descriptor)


def _watch(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # the writer was gone before the kernel watched
        os.kill(os.getpid(), signal.SIGIO)


def limit_resource(name: str, value: int) -> None:
    """Set a soft and hard resource limit, or keep the inherited hard limit where it is lower."""
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


def limit_files(directory: str, count: int) -> None:
    """Limit the files in the file system of ``directory``, which take kernel memory; checked by :func:`until_ready`."""
    _file_limits[directory] = count


def poll(reading: list[int], writing: list[int], seconds: float) -> tuple[list[int], list[int]]:
    """Return the descriptors that are ready for reading and for writing; none after a timeout."""
    poll = select.poll()  # select itself takes no descriptor above 1,023
    for descriptors, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for descriptor in descriptors:
            poll.register(descriptor, event)
    ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, seconds))}
    return [each for each in reading if each in ready], [each for each in writing if each in ready]


def until_ready(reading: list[int], writing: list[int], deadline: "Deadline") -> tuple[list[int], list[int]]:
    """Like :func:`poll`, until a deadline; ``JobError`` if the program has made too many files."""
    while True:
        for directory, count in _file_limits.items():
            found = os.statvfs(directory)
            if found.f_files - found.f_ffree > count:
                raise JobError(WRONG, f"made more than {count} files in {directory}")
        seconds = min(deadline.left(), _TICK_SECONDS)
        started = time.monotonic()
        ready = poll(reading, writing, seconds)
        deadline.clock.excuse(time.monotonic() - started - max(0.0, seconds))
        if any(ready) or seconds <= 0:
            return ready


def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start the program with pipes, unless ``options`` name others; ``JobError`` if there is no process for it."""
    try:
        return subprocess.Popen(command, **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options})
    except OSError as error:
        outcome = UNAVAILABLE if error.errno in (errno.EAGAIN, errno.ENOMEM) else UNGRADABLE
        raise JobError(outcome, f"the program's process does not start: {error}") from None


class Pipes:
    """The pipes of a process: its output so far, and the input that it has not read yet.

    ``output`` and ``errors`` hold what was received, ``open`` the descriptors that may give more; ``refused`` says that
    the process reads no more.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", unsent: bytes = b"", close_input: bool = False) -> None:
        assert process.stdout is not None
        assert process.stdin is not None or not unsent
        self._process, self._stdin, self._close_input = process, process.stdin, close_input
        self.unsent, self.refused = memoryview(unsent), False
        self.output, self.errors = bytearray(), bytearray()
        self.open = {process.stdout.fileno(): self.output}
        if process.stderr is not None:
            self.open[process.stderr.fileno()] = self.errors
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    def move(self, wait: Callable[[list[int], list[int]], tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
        """Read and write once what ``wait`` returns as ready of the descriptors, and return that."""
        if self._stdin is not None and self._close_input and not self.unsent:
            self._stdin.close()
        ready = wait(list(self.open), [self._stdin.fileno()] if self._stdin is not None and self.unsent else [])
        for descriptor in ready[0]:
            chunk = os.read(descriptor, 1 << 16)
            self.open[descriptor] += chunk
            if not chunk:
                del self.open[descriptor]
        for descriptor in ready[1]:
            try:
                self.unsent = self.unsent[os.write(descriptor, self.unsent[: 1 << 20]) :]
            except BrokenPipeError:
                self.unsent, self.refused = memoryview(b""), True
        return ready

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Sample(NamedTuple):
    wall: float  # seconds of the monotonic clock
    cpu: float  # processor seconds of all processes, including ended and waited-for ones
    runnable: dict[int, int]  # voluntary context switches of each runnable thread


class Clock:
    """Seconds charged to the processes whose ids ``processes`` returns."""

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._last = self._sample()
        self._late = self._charged = 0.0

    def now(self, look: bool = False) -> float:
        """Seconds charged since the clock was made; ``look`` takes a sample even within the interval."""
        if look or time.monotonic() - self._last.wall >= _INTERVAL_SECONDS:
            last, self._last = self._last, self._sample()
            cpu = max(0.0, self._last.cpu - last.cpu)
            starved = any(last.runnable.get(thread) == n for thread, n in self._last.runnable.items())
            wall = 0.0 if starved else self._last.wall - last.wall - self._late
            self._charged += max(cpu, wall)
            self._late = 0.0
        return self._charged + time.monotonic() - self._last.wall

    def excuse(self, seconds: float) -> None:
        """Do not charge for wall time in which this process itself was stopped or starved."""
        self._late += max(0.0, seconds)

    def deadline(self, seconds: float) -> "Deadline":
        return Deadline(self, self.now() + seconds, time.monotonic() + WALL_FACTOR * seconds)

    def _sample(self) -> Sample:
        cpu, runnable = 0.0, {}
        for process in self._processes():
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                cpu += time.clock_gettime(~process << 3 | 2)  # the processor clock of a process: clock_getcpuclockid(3)
                fields = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()
                cpu += (int(fields[13]) + int(fields[14])) / _TICKS_PER_SECOND  # children that it has waited for
                for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208  # pathlib takes 8 ms to import
                    status = _read(f"/proc/{process}/task/{thread}/status")
                    if b"\nState:\tR" in status:
                        runnable[int(thread)] = int(status.partition(_SWITCHES)[2].split(maxsplit=1)[0])
        return Sample(time.monotonic(), cpu, runnable)


class Deadline:
    def __init__(self, clock: Clock, charged: float, wall: float) -> None:
        self.clock, self.charged, self.wall = clock, charged, wall

    def left(self) -> float:
        """Seconds until the first of the two ends; at most 0 if one is reached."""
        charged = self.charged - self.clock.now()
        if charged <= 0:
            charged = self.charged - self.clock.now(look=True)
        return min(charged, self.wall - time.monotonic())

    def expired(self, seconds: float) -> bool:
        """Whether a limit of ``seconds`` is used up; ``JobError`` if only the wall time is."""
        if self.left() > 0:
            return False
        if time.monotonic() >= self.wall and self.clock.now() < self.charged:
            busy = f"the machine was too busy: in {WALL_FACTOR * seconds:g} s the program did not get its {seconds:g} s"
            raise JobError(STARVED, busy, timed_out=True)
        return True

    def sooner(self, seconds: float) -> "Deadline":
        """Another limit that starts now and ends no later than this one."""
        other = self.clock.deadline(seconds)
        return Deadline(self.clock, min(self.charged, other.charged), min(self.wall, other.wall))


@functools.cache
def program_clock() -> Clock:
    own = os.getpid()
    return Clock(lambda: descendants(own))


def descendants(root: int) -> list[int]:
    """The process and all its descendants; all processes of the namespace if it is the first one."""
    if root == 1:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    processes, pending = [], [root]
    while pending:
        process = pending.pop()
        processes.append(process)
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                pending += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    return processes


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
