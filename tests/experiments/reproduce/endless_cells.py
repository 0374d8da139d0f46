"""``python -m tests.experiments.reproduce.endless_cells PLAN OUTPUT``: a reproduction whose cells never end.

Prints a line as soon as two of them run.  Imports nothing heavy, for the cells' processes import this module first.
"""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple


class EndlessCell(NamedTuple):
    name: str
    needs: tuple[str, ...] = ()

    def done(self, output: Path) -> bool:
        return False


def endless(place: SimpleNamespace, cell: EndlessCell) -> float:
    (place.output / f"running_{cell.name}").touch()
    if cell.name == "busy":
        return float(9**9**9)  # one bytecode: no Python signal handler would run
    time.sleep(1000)
    return 0.0


def main(plan: str, output: Path) -> int:
    from experiments.__main__ import main as run_command
    from experiments.reproduce import __main__ as reproduce
    from experiments.reproduce import questions, work, work_queue

    def announce() -> None:
        while len(list(output.glob("running_*"))) < 2:
            time.sleep(0.05)
        print("running", flush=True)

    threading.Thread(target=announce, daemon=True).start()
    work_queue.run_cells.__defaults__ = (endless,)
    # What the cells' processes would import is half a minute of work.
    questions.missing_sets = lambda *_: {}
    questions.check_questions = lambda *_: None
    reproduce.cells_of = lambda *_: [EndlessCell("busy"), EndlessCell("asleep")]
    work.Workplace = lambda plan, output, *_, **__: SimpleNamespace(output=output)
    return run_command(["reproduce", "--plan", plan, "--jobs", "2", "--output", str(output)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
