"""The process that runs the tests: reads one job (a JSON line) and reports the result with the job's token.

The model's program runs in another process, which never sees tests, expected outputs or token: this process drops all
privileges and is not traceable (``PR_SET_DUMPABLE`` 0), so that a program of the same user cannot read its memory or
files. As the first process of its namespace it cannot be killed from inside, and the namespace ends with it; it ends
with the process that started the sandbox. Output of the tests is discarded; reports use a descriptor of their own.
"""

import ctypes
import importlib
import json
import math
import os
import signal
import sys
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
jobs = importlib.import_module("jobs")
process = importlib.import_module("process")
seccomp = importlib.import_module("seccomp")

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def main() -> None:
    report = keep_output_apart()
    job = json.loads(sys.stdin.buffer.readline())
    confine(job["limits"])
    send(report, job, ready=True)
    try:
        result = jobs.KINDS[job["kind"]](job)
    except process.JobError as error:
        subject = "the program " if error.outcome == process.WRONG else ""
        result = process.Report(error.outcome, f"{subject}{error}", error.timed_out)
    send(report, job, **result._replace(reason=result.reason[:500])._asdict())


def keep_output_apart() -> int:
    """Return a descriptor for reports that no child inherits; standard output becomes /dev/null."""
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return report


def send(report: int, job: dict[str, Any], **content: Any) -> None:
    unsent = memoryview(json.dumps({"token": job["token"], **content}).encode("ascii") + b"\n")
    while unsent:
        unsent = unsent[os.write(report, unsent) :]


def confine(allowed: dict[str, Any]) -> None:
    """Drop root, set the limits that the program inherits, filter system calls, and forbid tracing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if allowed["uid"] is not None:
        os.setgroups([])
        os.setresgid(allowed["uid"], allowed["uid"], allowed["uid"])
        os.setresuid(allowed["uid"], allowed["uid"], allowed["uid"])
    if allowed["alone"]:
        # A namespace's first process gets only signals that it handles; Python would handle this one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # If the caller ignored this signal, the time of waited-for children would not be counted.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process.end_with_writer(sys.stdin.fileno())
        for directory in ("/tmp", "/dev/shm"):  # bubblewrap limits only their size
            process.limit_files(directory, allowed["files"])
    else:
        process.end_group_with_writer(sys.stdin.fileno())
    for name, value in (
        ("RLIMIT_NPROC", allowed["processes"]),
        ("RLIMIT_AS", allowed["memory_bytes"]),
        ("RLIMIT_FSIZE", allowed["file_bytes"]),
        ("RLIMIT_NOFILE", allowed["open_files"]),
        ("RLIMIT_CPU", math.ceil(allowed["cpu_seconds"])),
        ("RLIMIT_SIGPENDING", 128),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_CORE", 0),
    ):
        if value is not None:
            process.limit_resource(name, value)
    if allowed["alone"]:
        seccomp.install()
    # Changing the user has cleared the setting of --die-with-parent.
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"the kernel refuses prctl({option}, {value})")


if __name__ == "__main__":
    main()
