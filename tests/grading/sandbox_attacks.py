"""Programs that attack the sandbox, and a runner that can be started by another user.

``python sandbox_attacks.py REPOSITORY PORT`` runs them all and prints their reports as JSON.  Standard library only.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MARKER = "left-behind-by-an-attack"


def read_attacks(kind: str) -> "dict[str, str]":
    """Programs by name, from ``attacks.txt``."""
    sections = Path(__file__).with_name("attacks.txt").read_text(encoding="utf-8").split("\n=== ")[1:]
    titled = [section.partition("\n") for section in sections]
    return {title.partition(": ")[2]: source for title, _, source in titled if title.startswith(kind)}


PROBES, HOSTILE = read_attacks("probe"), read_attacks("hostile")
SECONDS, MARGIN = 10.0, 0.5  # limit of a program, and what all of its job may take besides
ENDLESS_SECONDS = 0.5
COMPUTING = ("fork_bomb", "loop", "print_a_gigabyte")  # a very busy machine may not give them their limit
ENDLESS = (*COMPUTING, "sleep", "sleep_at_import")
# Those whose report has to name the limit.
MEET_A_LIMIT = {
    "fill_sockets": "memory",
    "empty_files": "files",
    "eat_memory_in_many_processes": "memory",
    "sleep": f"{ENDLESS_SECONDS:g} s",
    "sleep_at_import": f"{ENDLESS_SECONDS:g} s",
}


def seconds_of(name: str) -> float:
    """The limit of a program; only those that would never end meet it on time."""
    return ENDLESS_SECONDS if name in ENDLESS else SECONDS


def run_all(repository: str, port: int) -> dict[str, dict[str, object]]:
    from coca_sandbox.sandbox import Limits, Sandbox

    sandbox = Sandbox(Limits(memory_bytes=512 << 20))
    assert sandbox.sandboxed
    constants = f"REPOSITORY, PORT = {repository!r}, {port}\n"
    contained = "assert attempt() == 'contained', attempt()"
    jobs = {name: (constants + source, contained, 20.0) for name, source in PROBES.items()}
    jobs |= {name: (source, "assert answer(6) == 42", seconds_of(name)) for name, source in HOSTILE.items()}

    def run(job_of_one: "tuple[str, str, float]") -> dict[str, object]:
        source, tests, limit = job_of_one
        job = {"kind": "asserts", "source": source, "tests": tests, "prompt": None, "entry_point": None}
        started = time.monotonic()
        report = sandbox.run({**job, "seconds": limit}, total_seconds=limit + MARGIN)
        seconds = time.monotonic() - started
        starved = report.outcome == "ungradable" and report.timed_out
        return {"outcome": report.outcome, "reason": report.reason, "seconds": seconds, "starved": starved}

    with ThreadPoolExecutor(4) as threads:
        reports = dict(zip(jobs, threads.map(run, jobs.values()), strict=True))
    for name in COMPUTING:
        if reports[name]["starved"]:  # once more, and not beside others
            reports[name] = run(jobs[name])
    return reports


if __name__ == "__main__":
    print(json.dumps(run_all(sys.argv[1], int(sys.argv[2]))))
