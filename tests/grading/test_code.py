"""Code grading: the three kinds of tests, the separation of tests and program, order and limits."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.verdict import Outcome, Verdict
from tests.grading.sandbox_package import needs_sandbox
from tests.grading.tables import read_programs

pytestmark = [needs_sandbox, pytest.mark.timing]


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(seconds=3.0, total_seconds=8.0, workers=2)
    yield grader
    grader.close()


def record(tests: dict[str, object], **metadata: object) -> Record:
    return Record("r1", "test", "code", "?", "", metadata={"tests": tests, **metadata})


def asserts(code: str, entry_point: str | None = None, **metadata: object) -> Record:
    return record({"kind": "asserts", "code": code, "entry_point": entry_point}, **metadata)


def grade(grader: CodeGrader, record: Record, answer: str) -> Verdict:
    return grader.grade([record], [answer])[0]


PROGRAMS = read_programs()


@pytest.mark.parametrize(("name", "outcome", "tests", "program"), PROGRAMS, ids=[program[0] for program in PROGRAMS])
def test_the_table_of_programs(grader: CodeGrader, name: str, outcome: str, tests: str, program: str) -> None:
    verdict = grade(grader, asserts(tests), program)
    assert verdict.outcome.value == outcome, (name, verdict.reason)
    assert verdict.correct or verdict.reason


def test_tests_see_the_packages_that_programs_see(grader: CodeGrader) -> None:
    interpreter = getattr(sys, "_base_executable", sys.executable)
    there = subprocess.run([interpreter, "-I", "-c", "import pip"], capture_output=True, check=False).returncode == 0
    program = "def f():\n    import pip\n    return pip.__name__"
    verdict = grade(grader, asserts("import pip\nassert f() == pip.__name__"), program)
    assert verdict.outcome is (Outcome.RIGHT if there else Outcome.UNGRADABLE), verdict.reason


def test_a_prompt_that_does_not_run_is_ungradable_not_wrong(grader: CodeGrader) -> None:
    tests = {"kind": "asserts", "code": "assert f() == 1", "entry_point": "f"}
    record = Record("1", "mine", "code", "q", "", None, {"tests": tests, "prompt": "import nowhere\ndef f():\n"})
    (verdict,) = grader.grade([record], ["    return 1"])
    assert (verdict.outcome, verdict.reason) == (
        Outcome.UNGRADABLE,
        "the prompt does not run: ModuleNotFoundError: No module named 'nowhere'",
    )


PROMPT = (
    "import math\n\ndef poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
    'def find_zero(xs):\n    """A zero."""\n'
)
CHECK = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\ncheck(find_zero)\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return -xs[0] / xs[1]", True),
        ("```python\ndef find_zero(xs):\n    return -xs[0] / xs[1]\n```", True),
        ("    return 0", False),
        # A program may not redefine the helpers of the tests, Python's or the prompt's.
        ("```python\ndef poly(xs, x): return 0\ndef find_zero(xs): return 1\n```", False),
        ("```python\ndef abs(x): return 0\ndef find_zero(xs): return 1\n```", False),
        ("```python\ndef check(f): pass\ndef find_zero(xs): return 1\n```", False),
        ("```python\nimport math\nmath.fabs = abs = lambda x: 0\ndef find_zero(xs): return 1\n```", False),
    ],
)
def test_humaneval_with_a_prompt(grader: CodeGrader, answer: str, right: bool) -> None:
    verdict = grade(grader, asserts(CHECK, "find_zero", prompt=PROMPT), answer)
    assert verdict.correct is right, verdict.reason


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", True),
        ("import sys\na, b = map(int, sys.stdin.read().split())\nsys.stdout.write(f'{a + b}\\n\\n')", True),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", True),
        ("print(3)", False),
        ("a, b = map(int, input().split())\nprint(a + b, end='')\nexit(0)", True),
        ("a, b = map(int, input().split())\nprint(a + b)\nexit(1)", False),
        ("print(input())", False),
        ("while True: print('x' * 100000)", False),
        ("import os\nos.close(1)", False),
        ("", False),
    ],
)
def test_stdio(grader: CodeGrader, program: str, right: bool) -> None:
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20", "output": "30"}]
    verdict = grade(grader, record({"kind": "stdio", "cases": cases}), program)
    assert verdict.correct is right, verdict.reason


def test_stdio_takes_large_input_and_output(grader: CodeGrader) -> None:
    text = "\n".join(str(n) for n in range(300_000))
    cases = [{"input": text, "output": text}]
    program = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert grade(grader, record({"kind": "stdio", "cases": cases}), program).correct
    # A program need not read its input.
    cases = [{"input": text, "output": "ok"}]
    assert grade(grader, record({"kind": "stdio", "cases": cases}), "print('ok')").correct


OUTPUTS = {
    ("0.5", "0.5000000001"): True, ("0.5", "0.51"): False, ("1 2\n3", "1 2 3"): True, ("16030", "16030.0"): False,
    ("YES", "Yes"): False, ("1.0 2", "1.0"): False, ("1.0", "nan"): False, ("1.0e3", "+1000"): True,
    (".5", "0.50"): True, ("12.0", "1_2.0"): False, ("12.0", "１２.0"): False, ("1.0", "1.0f"): False,
}  # fmt: skip


def test_stdio_compares_words(grader: CodeGrader) -> None:
    records = [record({"kind": "stdio", "cases": [{"input": "", "output": expected}]}) for expected, _ in OUTPUTS]
    verdicts = grader.grade(records, [f"print({printed!r})" for _, printed in OUTPUTS])
    assert dict(zip(OUTPUTS, [verdict.correct for verdict in verdicts], strict=True)) == OUTPUTS


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def pair(a, b): return (a, [b])", True),
        ("def pair(a: int, b: Union[str, None]) -> List[Any]: return (a, [b])", True),
        ("class Solution:\n    def pair(self, a, b): return [a, [b]]", True),
        ("def pair(a, b): return [a, b]", False),
        ("def pair(a, b): raise KeyError(a)", False),
        ("pair = 3", False),
        ("x = 1", False),
        ("def pair(a, b): return [True, [b]]", False),
    ],
)
def test_call(grader: CodeGrader, program: str, right: bool) -> None:
    cases = [{"arguments": [1, "x"], "expected": [1, ["x"]]}, {"arguments": [1, None], "expected": [1, [None]]}]
    verdict = grade(grader, record({"kind": "call", "entry_point": "pair", "cases": cases}), program)
    assert verdict.correct is right, verdict.reason


def test_verdicts_come_in_order_whatever_they_take(grader: CodeGrader) -> None:
    programs = [f"import time\ntime.sleep({0.3 if n % 7 == 0 else 0})\ndef f(): return {n}" for n in range(8)]
    records = [asserts(f"assert f() == {n if n % 3 else -1}", time_limit=60) for n in range(8)]
    verdicts = grader.grade(records, programs)
    assert [v.correct for v in verdicts] == [bool(n % 3) for n in range(8)], [v.reason for v in verdicts]


def test_only_a_limit_on_time_counts_as_a_timeout(grader: CodeGrader) -> None:
    stdio: dict[str, object] = {"kind": "stdio", "cases": [{"input": "", "output": "1"}]}
    call: dict[str, object] = {"kind": "call", "entry_point": "f", "cases": [{"arguments": [], "expected": 1}]}
    says_so, hangs = "raise ValueError('took longer than 10 s')", "while True: pass"
    claims = [
        (asserts("assert f() == 1"), f"def f(): {says_so}"),
        (record(stdio), says_so),
        (record(call), f"def f(): {says_so}"),
    ]
    late = [
        (asserts("assert f() == 1", time_limit=0.5), hangs),
        (record(stdio, time_limit=0.5), hangs),
        (record(call, time_limit=0.5), hangs),
        (record(call, time_limit=0.5), f"def f():\n    {hangs}"),
    ]
    for cases, timeouts in ((claims, 0), (late, len(late))):
        before = grader.metrics()["timeouts"]
        verdicts = grader.grade([record for record, _ in cases], [program for _, program in cases])
        assert all("longer than" in verdict.reason for verdict in verdicts), verdicts
        assert grader.metrics()["timeouts"] - before == timeouts


def test_malformed_tests_stop_the_batch_before_anything_runs(grader: CodeGrader) -> None:
    with pytest.raises(DataError, match="r1"):
        grader.grade([asserts("assert True"), record({"kind": "?"})], ["", ""])


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": 99}, {"seconds": 0}, {"seconds": 9.0, "total_seconds": 1.0}]
)
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(GradingError):
        CodeGrader(**options)  # type: ignore[arg-type]
