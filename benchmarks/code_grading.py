"""How fast programs are graded: 500 programs of one test each, in the sandbox.

``python -m benchmarks.code_grading [--programs 500] [--output FILE]``
"""

import argparse
import sys
import time
from pathlib import Path

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code import CodeGrader
from coca_mindspeed.utils.json_files import write_json


def grade_programs(count: int) -> dict[str, float]:
    """Seconds for ``count`` programs, half of them wrong, and the number of right verdicts."""
    records, answers, expected = [], [], []
    for number in range(count):
        right = number % 2 == 0
        tests: dict[str, object]
        if number % 4 < 2:
            tests = {"kind": "asserts", "code": f"assert total([{number}, 1]) == {number + 1}", "entry_point": None}
            program = f"def total(values):\n    return sum(values){'' if right else ' + 1'}"
        else:
            tests = {"kind": "stdio", "cases": [{"input": f"{number} 1", "output": str(number + 1)}]}
            program = f"a, b = map(int, input().split())\nprint(a + b{'' if right else ' + 1'})"
        records.append(Record(str(number), "benchmark", "code", "?", "", metadata={"tests": tests}))
        answers.append(f"Here it is.\n```python\n{program}\n```\n")
        expected.append(right)
    grader = CodeGrader()
    started = time.perf_counter()
    verdicts = grader.grade(records, answers)
    seconds = time.perf_counter() - started
    grader.close()
    agreeing = sum(verdict.correct is right for verdict, right in zip(verdicts, expected, strict=True))
    return {"programs": count, "seconds": seconds, "right verdicts": agreeing}


def run(rounds: int) -> dict[str, float]:
    """For ``make bench``."""
    return grade_programs(5 * rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = grade_programs(options.programs)
    print(f"{options.programs} programs in {result['seconds']:.1f} s, {result['right verdicts']} verdicts right")
    if options.output:
        write_json(options.output, result)
    return 0 if result["right verdicts"] == options.programs else 1


if __name__ == "__main__":
    sys.exit(main())
