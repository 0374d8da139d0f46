"""Programs: the three kinds of tests, their separation from the program, forged answers, order and limits."""

import gzip
import json
import subprocess
import sys
from contextlib import closing

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.published import mbpp_sanitized
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.code import CodeGrader
from coca_mindspeed.grading.verdict import Outcome
from coca_sandbox.inside.names import undefined
from tests.grading.sandbox_attacks import read_attacks
from tests.grading.sandbox_package import needs_sandbox
from tests.grading.tables import read_programs
from tests.shared_data import shared_data
from tests.tables import EVERY

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def grader():
    with closing(CodeGrader(seconds=1.5, total_seconds=3.0, workers=2)) as grader:
        yield grader


def record(tests, **metadata):
    return Record("r1", "test", "code", "?", "", metadata={"tests": tests, **metadata})


def asserts(code, entry_point=None, **metadata):
    return record({"kind": "asserts", "code": code, "entry_point": entry_point}, **metadata)


def grade(grader, record, answer):
    return grader.grade([record], [answer])[0]


def check_programs(grader, cases):
    """Grade answers to records in one batch, whose verdicts come in order, and compare their outcomes."""
    verdicts = grader.grade([record for record, _, _ in cases], [answer for _, answer, _ in cases])
    found = [(answer, v.outcome.value, v.reason) for (_, answer, _), v in zip(cases, verdicts, strict=True)]
    assert [each for each, case in zip(found, cases, strict=True) if each[1] != case[2]] == []
    assert all(verdict.correct or verdict.reason for verdict in verdicts)


@pytest.mark.parametrize("every", EVERY)
def test_the_table_of_programs(grader, every):
    cases = [(asserts(tests), program, outcome) for _, outcome, tests, program in read_programs()[::every]]
    check_programs(grader, cases)


def test_tests_see_the_packages_that_programs_see(grader):
    interpreter = getattr(sys, "_base_executable", sys.executable)
    there = subprocess.run([interpreter, "-I", "-c", "import pip"], capture_output=True, check=False).returncode == 0
    program = "def f():\n    import pip\n    return pip.__name__"
    verdict = grade(grader, asserts("import pip\nassert f() == pip.__name__"), program)
    assert verdict.outcome is (Outcome.RIGHT if there else Outcome.UNGRADABLE), verdict.reason


PROMPT = (
    "import math\n\ndef poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
    'def find_zero(xs):\n    """A zero."""\n'
)
CHECK = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\ncheck(find_zero)\n"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20", "output": "30"}]
PAIRS = [{"arguments": [1, "x"], "expected": [1, ["x"]]}, {"arguments": [1, None], "expected": [1, [None]]}]
ADD = {"kind": "asserts", "code": "assert add(1, 2) == 3", "entry_point": "add"}
ADDS = "def add(a, b):\n    return a + b"
FORMS = {
    "find_zero": asserts(CHECK, "find_zero", prompt=PROMPT),
    "sums": record({"kind": "stdio", "cases": SUMS}),
    "lines": record({"kind": "stdio", "cases": [{"input": "1\n2\n", "output": "3"}]}),
    "pairs": record({"kind": "call", "entry_point": "pair", "cases": PAIRS}),
    "add": record(ADD),
    "echo": record({"kind": "stdio", "cases": [{"input": "1", "output": "1"}] * 2}),
}


@pytest.mark.parametrize("every", EVERY)
def test_the_table_of_forms(grader, every):
    """No program may redefine the helpers of the tests, Python's or the prompt's."""
    rows = read_programs("program_forms.txt")[::every]
    cases = [(FORMS[tests], program, outcome) for _, outcome, tests, program in rows]
    check_programs(grader, [*cases, (FORMS["add"], "x" * 300_000, "wrong")])


def test_a_fault_of_the_tests_is_ungradable(grader):
    faults = [
        {"code": "import no_such_module\nassert add(1, 2) == 3"},
        {"code": "assert add(1, 2) =="},
        {"code": "assert True", "entry_point": None},
    ]
    cases = [(record({**ADD, **fault}), ADDS, "ungradable") for fault in faults]
    # The prompt does not run.
    asked = asserts("assert f() == 1", "f", prompt="import nowhere\ndef f():\n")
    check_programs(grader, [*cases, (asked, "    return 1", "ungradable")])


def test_stdio_takes_large_input_and_output(grader):
    text = "\n".join(str(n) for n in range(300_000))
    copied, ignored = (record({"kind": "stdio", "cases": [{"input": text, "output": end}]}) for end in (text, "ok"))
    copy = "import sys\nsys.stdout.write(sys.stdin.read())"
    mapped = "import mmap, sys\nsys.stdout.buffer.write(mmap.mmap(0, 0, access=mmap.ACCESS_READ))"
    programs = (copied, copy), (copied, mapped), (ignored, "print('ok')")  # which need not read its input
    check_programs(grader, [(record, program, "right") for record, program in programs])


OUTPUTS = {
    ("0.5", "0.5000000001"): True, ("0.5", "0.51"): False, ("1 2\n3", "1 2 3"): True, ("16030", "16030.0"): False,
    ("YES", "Yes"): False, ("1.0 2", "1.0"): False, ("1.0", "nan"): False, ("1.0e3", "+1000"): True,
    (".5", "0.50"): True, ("12.0", "1_2.0"): False, ("12.0", "１２.0"): False, ("1.0", "1.0f"): False,
}  # fmt: skip


def test_stdio_compares_words(grader):
    records = [record({"kind": "stdio", "cases": [{"input": "", "output": expected}]}) for expected, _ in OUTPUTS]
    verdicts = grader.grade(records, [f"print({printed!r})" for _, printed in OUTPUTS])
    assert dict(zip(OUTPUTS, [verdict.correct for verdict in verdicts], strict=True)) == OUTPUTS


@pytest.mark.timing
def test_only_a_limit_on_time_counts_as_a_timeout(grader):
    stdio = {"kind": "stdio", "cases": [{"input": "", "output": "1"}]}
    call = {"kind": "call", "entry_point": "f", "cases": [{"arguments": [], "expected": 1}]}
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


def test_malformed_tests_stop_the_batch_before_anything_runs(grader):
    with pytest.raises(DataError, match="r1"):
        grader.grade([asserts("assert True"), record({"kind": "?"})], ["", ""])


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": 99}, {"seconds": 0}, {"seconds": 9.0, "total_seconds": 1.0}]
)
def test_senseless_options_are_refused(options):
    with pytest.raises(GradingError):
        CodeGrader(**options)


# Speaks the protocol itself: announces what it likes and answers 0 to everything, whatever the tests call.
SERVER = """
import __main__, json, os
requests, answers = __main__.REQUESTS, __main__.ANSWERS
def serve(exports):
    os.write(answers, json.dumps({"exports": exports}).encode() + b"\\n")
    for line in os.fdopen(requests):
        os.write(answers, b'{"value": 0}\\n')
NAMES = "set sorted len abs all any isinstance list str __import__ AssertionError".split()
handle = {"reference": 0}
"""
FORGED = read_attacks("forged") | {name: SERVER + source for name, source in read_attacks("server").items()}


def test_the_protocol_gives_no_more_than_a_function_does(grader):
    for tests in (
        asserts("assert set(f([1, 2])) == set([3, 4])"),
        asserts("assert sorted(f([1, 2])) == sorted([3, 4])", "f"),
    ):
        check_programs(grader, [(tests, program, "wrong") for program in FORGED.values()])


def test_what_tests_use_of_a_program(grader):
    nothing = ("assert True", "assert sqrt(4) == abs(-2)", "def check(candidate):\n    assert candidate(1)")
    lacking = "class np:\n    allclose = lambda *a: True\ndef f(): return 0"
    raised = "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False"
    close = asserts("assert np.allclose(f(), 2.5)")
    # The sandbox's Python may lack numpy, and then nothing that needs it can be graded.
    [verdict] = grader.grade([close], ["def f(): return 2.5"])
    has_numpy = verdict.outcome.value == "right"
    assert has_numpy or "numpy" in verdict.reason
    check_programs(
        grader,
        [
            *((asserts(tests, name), "def f(): return 0", "ungradable") for tests in nothing for name in (None, "f")),
            (close, lacking, "wrong" if has_numpy else "ungradable"),
            (asserts(raised), "def f(x): raise ValueError", "right"),
        ],
    )


def test_names_are_sorted_by_the_tests_alone():
    names = undefined("assert math.isclose(f(x), 2) and Counter(g()) == {}\nassert len(f(1)) == LIMIT\nx = 3")
    assert names.program == {"f", "g", "LIMIT"}
    assert names.called == {"f", "g"}
    assert names.standard == {"math": ("math", None), "Counter": ("collections", "Counter")}
    # A name that the tests bind belongs to them; a parameter of the same name does so inside of its function only.
    assert undefined("def check(f):\n    assert f(1)\ncheck(f)").program == {"f"}
    assert undefined("f = lambda x: x\nassert f(1)").program == frozenset()
    assert undefined("import queue\nassert queue.Queue and f(1)").standard == {}
    assert undefined("assert f(1)", given=["f"]).program == frozenset()
    assert undefined("assert f(1)", given=["f"], entry_point="f").program == {"f"}
    assert undefined("assert sum(10, 15) == 6").program == {"sum"}
    assert undefined("assert sum(10, 15) == abs(-6)").program == frozenset()
    assert undefined("assert __builtins__ and __import__('os') and f(1)").program == {"f"}


@pytest.fixture(scope="module")
def usual_grader():
    with closing(CodeGrader()) as grader:  # as runs have it
        yield grader


def prepared(dataset, path, output):
    """The records that ``coca-mindspeed data prepare`` makes of a publisher's file."""
    assert main(["data", "prepare", dataset, "--input", str(path), "--output", str(output)]) == 0
    return list(read_records(output / "test.jsonl"))


@pytest.mark.published
def test_humaneval_solutions_are_right_and_empty_ones_wrong(usual_grader, tmp_path):
    path = shared_data("HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        solutions = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    records = prepared("humaneval", path, tmp_path / "humaneval")
    assert len(records) == 164
    check_programs(usual_grader, [(record, solutions[record.id], "right") for record in records])
    check_programs(usual_grader, [(record, "    return None", "wrong") for record in records[::8]])


@pytest.mark.published
def test_mbpp_solutions_are_right(usual_grader, tmp_path):
    """A third of them: those of its test split as prepared, and the others."""
    path = shared_data("sanitized-mbpp.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    solutions = {f"mbpp-{row['task_id']}": f"```python\n{row['code']}\n```" for row in rows}
    records = prepared("mbpp_sanitized", path, tmp_path / "mbpp")
    assert len(records) == 257
    test_split = {record.id for record in records}
    every = [mbpp_sanitized(row, number) for number, row in enumerate(rows)]
    records += [record for record in every if record.id not in test_split]
    check_programs(usual_grader, [(record, solutions[record.id], "right") for record in records[::3]])
