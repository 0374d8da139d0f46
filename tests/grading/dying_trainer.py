"""A process that grades programs without end, to be killed: ``python dying_trainer.py``.  Standard library only.

Prints a line as soon as every program does what it is here for.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = {
    "sleeps": ("import time\ndef f(): time.sleep(1000)", "f()"),
    "loops": ("def f():\n    while True: pass", "f()"),
    "forks": (
        "import os, signal, time\ndef f():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    os.setsid()\n"
        "    for _ in range(3): os.fork()\n    time.sleep(1000)",
        "f()",
    ),
    "keeps the tests busy in one bytecode": ("def f(): return 1", "import itertools\nsum(itertools.repeat(f()))"),
}
# Four sandboxes of bubblewrap, harness and program; the forks make eight processes of one.
PROCESSES = 3 * len(PROGRAMS) + 7
_BUSY_SECONDS = 0.3  # of the program that loops, and of the harness that is kept busy; no start takes so long


def main() -> None:
    from coca_sandbox.sandbox import Sandbox

    sandbox = Sandbox()
    for source, tests in PROGRAMS.values():
        job = {"kind": "asserts", "source": source, "tests": tests, "prompt": None, "entry_point": "f", "seconds": 60.0}
        threading.Thread(target=sandbox.run, args=(job, 60.0), daemon=True).start()
    deadline = time.monotonic() + 300.0
    while not _all_run():
        assert time.monotonic() < deadline, "the programs do not start"
        time.sleep(0.02)
    print("running", flush=True)
    time.sleep(1000)


def _all_run() -> bool:
    below = descendants("self")
    return len(below) >= PROCESSES and sum(processor_seconds(each) > _BUSY_SECONDS for each in below) >= 2


def descendants(process: "int | str") -> dict[int, str]:
    """Ids of all processes below one, with the times at which they started."""
    found: dict[int, str] = {}
    for children in Path(f"/proc/{process}").glob("task/*/children"):
        try:
            for child in map(int, children.read_text().split()):
                found[child] = started(child)
                found |= descendants(child)
        except OSError:
            continue
    return found


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def started(process: int) -> str:
    """When a process started, in the kernel's ticks; an id may be used again."""
    return _stat(process)[19]


def processor_seconds(process: int) -> float:
    """That a process has used; 0 if it has ended."""
    with suppress(OSError):
        return sum(map(int, _stat(process)[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def command_of(process: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return ""


def survivors(processes: dict[int, str], seconds: float) -> list[str]:
    """Those that still run after so long; zombies have ended."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for process, start in processes.items():
            try:
                state = _stat(process)[0]
                if state != "Z" and started(process) == start:
                    left.append(f"{process} {state} {command_of(process)}")
            except OSError:
                continue
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def end_survivors(processes: dict[int, str], seconds: float) -> list[str]:
    """What still ran after so long, and is killed now: a test that fails leaves nothing behind."""
    left = survivors(processes, seconds)
    for process in map(int, (line.split()[0] for line in left)):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return left


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
