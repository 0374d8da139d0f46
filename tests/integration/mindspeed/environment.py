"""What the integration tests need from the machine, and how they start processes."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from coca_mindspeed.mindspeed.start.process import CPU_SHIM

REPOSITORY = Path(__file__).parents[3]
os.environ[CPU_SHIM] = "tests.support.mindspeed_host"
_MISSING = [name for name in CHECKOUTS if not os.environ.get(name)]

#: Skips a module of tests where the checkouts or Ray are missing.
needs_mindspeed = [
    pytest.mark.skipif(bool(_MISSING), reason=f"needs checkouts: {', '.join(_MISSING)} not set (docs/port.md)"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs requirements/mindspeed-host.txt (ray is not installed)"
    ),
]


def environment(**changes):
    """For a child process: one thread, bytecode beside the read-only checkouts, and our package found first."""
    paths = [str(REPOSITORY), *(os.environ[name] for name in CHECKOUTS)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(REPOSITORY / ".pytest_cache" / "bytecode"),  # compiled once for all processes
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # of its own accord Ray starts workers at 15, which starve on a busy machine
        "RAY_prestart_worker_first_driver": "0",
        **changes,
    }


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(module, argument, world_size, log, timeout=800, **variables):
    """Run ``python -m module argument`` as ``world_size`` ranks; fail with the log's end if one of them does."""
    port = str(free_port())
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(argument)],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(
                    RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **variables
                ),
            )
            for rank in range(world_size)
        ]
        try:
            codes = [process.wait(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        pytest.fail(f"exit codes {codes}; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
