"""Waiting for the program, with an eye on what no resource limit counts."""

import os
import select
import time

_TICK_SECONDS = 0.05
_limits: dict[str, int] = {}


class TooManyFilesError(Exception):
    """The program has made more files than it may; each takes memory of the kernel, however empty."""


def limit_files(directory: str, count: int) -> None:
    """From now on, look at the number of files in the file system of ``directory``; beyond ``count`` waiting raises."""
    _limits[directory] = count


def until_ready(reading: list[int], writing: list[int], deadline: float) -> tuple[list[int], list[int]]:
    """Those descriptors that can be read and written; none after the deadline.

    Raises:
        TooManyFilesError: the program has made too many.
    """
    while True:
        for directory, count in _limits.items():
            found = os.statvfs(directory)
            if found.f_files - found.f_ffree > count:
                raise TooManyFilesError(f"made more than {count} files in {directory}")
        left = deadline - time.monotonic()
        readable, writable, _ = select.select(reading, writing, [], max(0.0, min(left, _TICK_SECONDS)))
        if readable or writable or left <= 0:
            return readable, writable
