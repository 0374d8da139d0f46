"""Processes: a watchdog for the parent's death, resource limits, and polling of pipes.

A process that must not outlive its parent inherits the reading end of a pipe whose writing end the parent holds
(:func:`hold`), and calls :func:`end_with_writer`.
"""

import ctypes
import fcntl
import os
import resource
import select
import signal
import time
from typing import Any

_TICK_SECONDS = 0.05
_held: set[int] = set()
_file_limits: dict[str, int] = {}


def hold(descriptor: int) -> None:
    """Register the writing end of a watchdog's pipe: forked children of this process get ``/dev/null`` in its place."""
    _held.add(descriptor)


def release(descriptor: int) -> None:
    """Forget the descriptor, before it is closed."""
    _held.discard(descriptor)


def _release_in_child() -> None:
    if not _held:
        return
    # Replaced, not closed: the Python object that owns the number closes it later.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _held:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _held.clear()


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


class TooManyFilesError(Exception):
    """The program has created too many files; each takes kernel memory, even if it is empty."""


def limit_files(directory: str, count: int) -> None:
    """Limit the files in the file system of ``directory``; checked by :func:`until_ready`."""
    _file_limits[directory] = count


def poll(reading: list[int], writing: list[int], seconds: float) -> tuple[list[int], list[int]]:
    """Return the descriptors that are ready for reading and for writing; none after a timeout."""
    poll = select.poll()  # select itself takes no descriptor above 1,023
    for descriptors, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for descriptor in descriptors:
            poll.register(descriptor, event)
    ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, seconds))}
    return [each for each in reading if each in ready], [each for each in writing if each in ready]


def until_ready(reading: list[int], writing: list[int], deadline: Any) -> tuple[list[int], list[int]]:
    """Like :func:`poll`, until a ``Deadline``; raises :class:`TooManyFilesError`."""
    while True:
        for directory, count in _file_limits.items():
            found = os.statvfs(directory)
            if found.f_files - found.f_ffree > count:
                raise TooManyFilesError(f"made more than {count} files in {directory}")
        seconds = min(deadline.left(), _TICK_SECONDS)
        started = time.monotonic()
        ready = poll(reading, writing, seconds)
        deadline.clock.excuse(time.monotonic() - started - max(0.0, seconds))
        if any(ready) or seconds <= 0:
            return ready
