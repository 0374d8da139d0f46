"""``python -m tests.experiments.reproduce.endless_jobs PLAN OUTPUT``: a reproduction whose jobs never end.

Prints a line when two of them run.  Imports nothing heavy, because the workers import this module first.
"""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple


class EndlessJob(NamedTuple):
    name: str
    needs: tuple[str, ...] = ()

    def done(self, output):
        return False


def endless(place, job):
    (place.output / f"running_{job.name}").touch()
    if job.name == "busy":
        return float(9**9**9)  # one bytecode: no Python signal handler would run
    time.sleep(1000)
    return 0.0


def main(plan, output):
    from experiments.__main__ import main as run_command
    from experiments.reproduce import __main__ as reproduce
    from experiments.reproduce import job, questions, scheduler

    def announce():
        while len(list(output.glob("running_*"))) < 2:
            time.sleep(0.05)
        print("running", flush=True)

    threading.Thread(target=announce, daemon=True).start()
    scheduler.run_jobs.__defaults__ = (endless,)
    questions.missing_sets = lambda *_: {}
    questions.check_questions = lambda *_: None
    reproduce.jobs_of = lambda *_: [EndlessJob("busy"), EndlessJob("asleep")]
    job.Workplace = lambda plan, output, *_, **__: SimpleNamespace(output=output)  # the real one imports torch
    return run_command(["reproduce", "--plan", plan, "--jobs", "2", "--output", str(output)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
