"""What a process that runs cells does first.  Imports nothing heavy: until then it could outlive its parent."""

import os
from multiprocessing.connection import Connection

from coca_mindspeed.grading.code.inside.process import end_with_writer


def end_with_parent(parent: Connection) -> None:
    """Have the kernel end this process once the parent has closed its end, or is gone; Ctrl-C is the parent's alone.

    Args:
        parent: the reading end of a pipe whose other end the parent alone holds.
    """
    os.setsid()
    # Opened anew, because the kernel tells one process for each open file, and all workers inherit the same.
    end_with_writer(os.open(f"/proc/self/fd/{parent.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
