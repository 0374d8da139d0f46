"""Waiting for the program, with an eye on its time and on what no resource limit counts."""

import os
import select
import time
from typing import Any

_TICK_SECONDS = 0.05
_limits: dict[str, int] = {}


class TooManyFilesError(Exception):
    """The program has made more files than it may; each takes memory of the kernel, however empty."""


def limit_files(directory: str, count: int) -> None:
    """From now on, look at the number of files in the file system of ``directory``; beyond ``count`` waiting raises."""
    _limits[directory] = count


def poll(reading: list[int], writing: list[int], seconds: float) -> tuple[list[int], list[int]]:
    """Those descriptors that can be read and written; none after so many seconds."""
    poll = select.poll()  # select itself takes no descriptor above 1,023
    for descriptors, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for descriptor in descriptors:
            poll.register(descriptor, event)
    ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, seconds))}
    return [each for each in reading if each in ready], [each for each in writing if each in ready]


def until_ready(reading: list[int], writing: list[int], deadline: Any) -> tuple[list[int], list[int]]:
    """Those descriptors that can be read and written; none after the deadline.

    Args:
        deadline: a ``Deadline`` of ``clock.py``.

    Raises:
        TooManyFilesError: the program has made too many.
    """
    while True:
        for directory, count in _limits.items():
            found = os.statvfs(directory)
            if found.f_files - found.f_ffree > count:
                raise TooManyFilesError(f"made more than {count} files in {directory}")
        seconds = min(deadline.left(), _TICK_SECONDS)
        started = time.monotonic()
        ready = poll(reading, writing, seconds)
        deadline.clock.excuse(time.monotonic() - started - max(0.0, seconds))
        if any(ready) or seconds <= 0:
            return ready
