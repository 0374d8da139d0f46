"""This process: its memory and CPUs (cgroups(7), versions 1 and 2), its waiting threads, and its signals.

Ctrl-C and SIGTERM save a checkpoint between two steps of a training; elsewhere they stop, and report what is saved.
"""

import math
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import FrameType

from coca_mindspeed.errors import TrainingError

GIB = 2**30


def find_libgomp_of_scikit_learn() -> Path | None:
    """The OpenMP library in the wheel of scikit-learn; on aarch64 it has to be loaded before other libraries."""
    folders = (Path(sysconfig.get_path(name)) / "scikit_learn.libs" for name in ("platlib", "purelib"))
    return next((path for folder in folders for path in sorted(folder.glob("libgomp-*.so*"))), None)


_NO_LIMIT = 2**60  # version 1 writes the greatest multiple of a page below 2**63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use by the limits of its group and of the groups above; None: no limit found."""
    return min((limit for _, limit in _limited_groups(root)), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the groups of :func:`memory_limit` leave for their processes, this one and others; None: no limit.

    The file cache, which the kernel gives up when memory is short, counts as free.
    """
    left = []
    for group, limit in _limited_groups(root):
        counts = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        # Version 1 counts the groups below only by the names with total_; version 2 always does.
        cache = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in ("active_file", "inactive_file"))
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes") or "0"
        left.append(max(0, limit - max(0, int(used) - cache)))
    return min(left, default=None)


def _limited_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The directories of this process's control groups that limit its memory, and their limits in bytes."""
    for group in _groups(root, "memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            yield group, int(limit)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's control groups with the controller, and of the groups above them."""
    for line in [*_read(root / "proc" / "self" / "cgroup").splitlines(), "0::/"]:
        hierarchy, controllers, group = line.split(":", 2)
        mount = root / "sys" / "fs" / "cgroup"
        if hierarchy != "0":
            if controller not in controllers.split(","):
                continue
            mount /= controller
        inside = PurePosixPath(group.lstrip("/"))
        yield from (mount / folder for folder in (inside, *inside.parents))


def _read(file: Path) -> str:
    """The text of a file of the kernel, stripped; empty if there is none here."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def limit_spinning() -> None:
    """Let the threads of OpenMP spin for a moment only before they sleep, unless a variable of the user's decides.

    By default they spin for long while they wait for each other.  On a machine that does anything else, they then take
    the core that the thread they wait for needs; threads that sleep at once wake up late (docs/training.md, CPU
    threads).  To be called before torch is loaded; processes that are started inherit it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs by this process's affinity and the quotas of its control groups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        limit = _read(group / "cpu.max").split()  # version 2: quota and period in microseconds
        limit = limit or [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(limit) == 2 and all(text.isdecimal() for text in limit) and int(limit[1]):
            count = min(count, math.ceil(int(limit[0]) / int(limit[1])))
    return max(1, count)


class InterruptedRunError(TrainingError):
    """The run was asked to stop; ``saved`` is the first part of the message, the rest says how to continue."""

    exit_code = 130  # as the shell reports Ctrl-C

    def __init__(self, saved: str, go_on: str = "") -> None:
        super().__init__("; ".join(filter(None, (saved, go_on))))
        self.saved = saved


@contextmanager
def stop_request(then: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Set the event at the first SIGINT or SIGTERM, and call ``then``, instead of stopping.

    Only the main thread can catch signals.
    """
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
        if request.is_set():  # somebody else (Ray) has put this handler back
            signal.raise_signal(number)
            return
        request.set()
        then()
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(saved: str, go_on: str | Callable[[], str] = "") -> Iterator[None]:
    """Raise InterruptedRunError with ``saved`` and ``go_on`` (or its result) on SIGINT or SIGTERM."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedRunError(saved, go_on if isinstance(go_on, str) else go_on()) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)
