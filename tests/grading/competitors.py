"""A machine that is busy with other work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_processor(competitors: int) -> Iterator[None]:
    """Only one processor for this thread and what it starts, and others that compute on it all the time."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    others = [
        # A session of its own, because the kernel may divide the processors among sessions first.
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
        for _ in range(competitors)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, mine)
