"""The processes of a run over Ray, known by its folder for Ray's sockets."""

import contextlib
import os
from pathlib import Path


def processes_below(ray_directory):
    """``/proc`` of each process whose environment or command names the folder, and of no others."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            known = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if ray_directory.encode() in known:
                yield process


def processor_seconds(ray_directory):
    """That the processes which still run have used."""
    ticks = 0
    for process in processes_below(ray_directory):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")
