"""Runs ``python -m verl.trainer.main_ppo`` as a user would, on a CPU, and reads what it left."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.integration.processes import processes_below, processor_seconds
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


def environment(run, ray_directory, **more):
    """Of a verl process on this machine's CPU."""
    modules = ["tests.support.verl_host", *filter(None, [more.pop("modules", "")])]
    return {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # of its own accord Ray starts workers at 15, which starve on a busy machine
        "RAY_TMPDIR": ray_directory,
        "HF_DATASETS_CACHE": str(run / "datasets_cache"),
        **more,
    }


_RAY_IS_UP = b"Started a local Ray instance"
_RAY_WAS_SLOW = b"The current node timed out during startup"  # it allows itself 30 seconds, whatever the machine does
_STARTS, _START_SECONDS = 4, 600.0


def start(config, *overrides, **more):
    """Start a run, and once more where Ray itself did not come up in time; nothing of ours has run by then."""
    log = config.parent / "log.txt"
    for _ in range(_STARTS):
        before = log.stat().st_size if log.is_file() else 0
        loop = _start(config, *overrides, **more)
        until(lambda run=loop, at=before: not run.running or _RAY_IS_UP in log.read_bytes()[at:], _START_SECONDS)
        if _RAY_WAS_SLOW not in log.read_bytes()[before:]:
            return loop
        loop.kill()
    raise TimeoutError(f"Ray did not come up in {_STARTS} starts; is this machine very busy?")


def _start(config, *overrides, **more):
    """In a process group of its own; its output goes beside its configuration."""
    run = config.parent
    ray_directory = tempfile.mkdtemp(prefix="coca-", dir="/tmp")  # Ray's sockets need a short path
    log = (run / "log.txt").open("ab")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            f"--config-dir={run}",
            f"--config-name={config.stem}",
            *overrides,
        ],
        cwd=run,
        env=environment(run, ray_directory, **more),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Loop(run, process, ray_directory)


class Loop:
    """A run that was started."""

    def __init__(self, run, process, ray_directory):
        self.run, self._process, self._ray_directory = run, process, ray_directory

    def wait(self, timeout=1500):
        """Its exit code; whatever it has started is ended."""
        try:
            return self._process.wait(timeout)
        finally:
            self.kill()

    @property
    def running(self):
        return self._process.poll() is None

    def processor_seconds(self):
        """That the processes which it has started and which still run have used."""
        return processor_seconds(self._ray_directory)

    def kill(self):
        """SIGKILL to it and to everything that it has started."""
        for group in {self._process.pid, *_process_groups_below(self._ray_directory)}:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        shutil.rmtree(self._ray_directory, ignore_errors=True)


def _process_groups_below(ray_directory):
    found = set()
    for process in processes_below(ray_directory):
        with contextlib.suppress(OSError):
            found.add(os.getpgid(int(process.name)))
    return found - {os.getpgid(0)}


def metrics(run):
    """Step -> metrics, of verl's own file logger."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


def rollouts(run, step):
    """Our dump of a step."""
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def log_of(run):
    return (run / "log.txt").read_text(errors="replace")
