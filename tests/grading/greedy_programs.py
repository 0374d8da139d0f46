"""Grades 4 right programs that each use most of their processes, and prints the reports.  Standard library only.

They sleep so that their processes exist at the same time: programs in different sandboxes cannot wait for each other.
"""

import json
from concurrent.futures import ThreadPoolExecutor

THREADS = """
import threading, time
def f():
    threads = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(24)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return 1
"""
PROCESSES = """
import os, time
def f():
    children = []
    for _ in range(24):
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        children.append(child)
    return int(all(os.waitpid(child, 0)[1] == 0 for child in children))
"""


def main() -> None:
    from coca_sandbox.sandbox import Sandbox

    sandbox = Sandbox()

    def grade(source: str) -> tuple[str, str]:
        job = {"kind": "asserts", "source": source, "tests": "assert f() == 1", "prompt": None, "entry_point": None}
        report = sandbox.run({**job, "seconds": 30.0}, 30.0)
        return report.outcome, report.reason

    with ThreadPoolExecutor(4) as threads:
        print(json.dumps(list(threads.map(grade, [THREADS, PROCESSES] * 2))))


if __name__ == "__main__":
    main()
