"""Initialiser of a worker process; imports nothing heavy, because until it runs the worker could outlive its parent."""

import os
from multiprocessing.connection import Connection

from coca_sandbox.inside.process import end_with_writer


def end_with_parent(parent: Connection) -> None:
    """End this process when the parent closes its end of the pipe or dies; only the parent receives Ctrl-C."""
    os.setsid()
    # Reopened, because the kernel signals one process per open file, and all workers inherit the same.
    end_with_writer(os.open(f"/proc/self/fd/{parent.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
