"""The time that a program is charged for, which does not grow while it only waits for a processor.

A busy machine must not make a right program wrong, and a program must not gain time by sleeping, waiting or hiding its
work in children.  The clock looks at the whole tree of processes 20 times a second and charges for each interval

- the processor time of all processes, if a thread was runnable throughout the interval: it got what the machine had;
- the wall time otherwise, or the processor time where that is more, because several processors were used.

A thread was runnable throughout if it is runnable at both ends and has not given up its processor between them, by the
kernel's count of voluntary context switches; so short sleeps count as sleep.  Calls by which a thread could give up its
processor without being counted are filtered (see ``seccomp.py``).
"""

import functools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

# A program's limit in wall time, as a multiple of its limit: beyond it the machine is too busy to tell.
WALL_FACTOR = 10.0
_INTERVAL_SECONDS = 0.045
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SWITCHES = b"\nvoluntary_ctxt_switches:"


class Sample(NamedTuple):
    """A look at the processes.

    Attributes:
        wall: seconds of the monotonic clock.
        cpu: processor seconds of all processes, ended ones that were waited for included.
        runnable: for each runnable thread, how often it has given up its processor.
    """

    wall: float
    cpu: float
    runnable: dict[int, int]


class Clock:
    """Seconds charged to a tree of processes.

    Args:
        processes: returns the ids of all processes of the tree.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._last = self._sample()
        self._late = self._charged = 0.0

    def now(self, look: bool = False) -> float:
        """Seconds charged since the clock was made.

        Args:
            look: look at the processes, even if the last look was less than an interval ago.
        """
        if look or time.monotonic() - self._last.wall >= _INTERVAL_SECONDS:
            last, self._last = self._last, self._sample()
            cpu = max(0.0, self._last.cpu - last.cpu)
            starved = any(last.runnable.get(thread) == n for thread, n in self._last.runnable.items())
            wall = 0.0 if starved else self._last.wall - last.wall - self._late
            self._charged += max(cpu, wall)
            self._late = 0.0
        return self._charged + time.monotonic() - self._last.wall

    def excuse(self, seconds: float) -> None:
        """Do not charge for so much wall time, in which this process itself was stopped or got no processor."""
        self._late += max(0.0, seconds)

    def deadline(self, seconds: float) -> "Deadline":
        """The end of a limit that starts now."""
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
    """When a limit ends: in charged seconds, and in wall time at the latest."""

    def __init__(self, clock: Clock, charged: float, wall: float) -> None:
        self.clock, self.charged, self.wall = clock, charged, wall

    def left(self) -> float:
        """Seconds until the first of the two ends may be reached; at most 0 if one has been."""
        charged = self.charged - self.clock.now()
        if charged <= 0:
            charged = self.charged - self.clock.now(look=True)
        return min(charged, self.wall - time.monotonic())

    def starved(self) -> bool:
        """Whether the wall time has ended before the charged time."""
        return time.monotonic() >= self.wall and self.clock.now() < self.charged

    def sooner(self, seconds: float) -> "Deadline":
        """The end of another limit that starts now, but no later than this one."""
        other = self.clock.deadline(seconds)
        return Deadline(self.clock, min(self.charged, other.charged), min(self.wall, other.wall))


@functools.cache
def program_clock() -> Clock:
    """The clock of this process and everything that it starts."""
    own = os.getpid()
    return Clock(lambda: descendants(own))


def descendants(root: int) -> list[int]:
    """The process and all of its descendants; where it is the first of a namespace, all processes there."""
    if root == 1:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    found, pending = [], [root]
    while pending:
        process = pending.pop()
        found.append(process)
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                pending += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
