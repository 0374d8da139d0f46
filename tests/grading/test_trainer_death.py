"""Nothing of grading outlives the process that grades, however that one ends."""

import signal
import subprocess
import sys

import pytest

from tests.grading.dying_trainer import descendants, end_survivors
from tests.grading.sandbox_package import REPOSITORY, needs_sandbox, script_of

pytestmark = pytest.mark.timing

WORKERS = """
import os, threading, time
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import hang_in_one_bytecode, nap
workers = Workers(count=2, seconds=300.0)
results = workers.map(nap, [0.0] * 2)
list(results)
threading.Thread(target=lambda: list(workers.map(hang_in_one_bytecode, [100] * 2)), daemon=True).start()
time.sleep(0.5)
if os.fork() == 0:  # as a data loader's worker, which lives on for a while
    os.close(1)
    time.sleep(30)
    os._exit(0)
print("running", flush=True)
time.sleep(1000)
"""


def end_and_count(trainer, how, at_least):
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "running\n"
    processes = descendants(trainer.pid)
    assert len(processes) >= at_least, processes
    trainer.send_signal(how)
    trainer.wait()
    trainer.stdout.close()
    return end_survivors(processes, 2.0)


@needs_sandbox
@pytest.mark.parametrize(("how", "user"), [(signal.SIGKILL, "this user"), (signal.SIGTERM, "nobody")])
def test_sandboxes_end_with_the_trainer(how, user):
    with script_of(user, "dying_trainer.py") as (command, options):
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        assert end_and_count(trainer, how, at_least=12) == []


def test_workers_end_with_the_trainer_whatever_it_forked():
    trainer = subprocess.Popen([sys.executable, "-c", WORKERS], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    left = end_and_count(trainer, signal.SIGKILL, at_least=3)
    assert left  # the forked process itself
    assert not [command for command in left if "serve(" in command]
