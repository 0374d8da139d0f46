"""Programs that answer for the tests instead of passing them: by the protocol, by names, by how they end."""

from collections.abc import Iterator

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.code.inside.names import undefined
from coca_mindspeed.grading.verdict import Outcome
from tests.grading.sandbox_attacks import read_attacks
from tests.grading.sandbox_package import needs_sandbox

pytestmark = needs_sandbox

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


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(seconds=5.0, total_seconds=10.0, workers=2)
    yield grader
    grader.close()


def outcome(grader: CodeGrader, tests: str, program: str, entry_point: str | None = None) -> Outcome:
    metadata = {"tests": {"kind": "asserts", "code": tests, "entry_point": entry_point}}
    return grader.grade([Record("r", "mbpp", "code", "?", "", metadata=metadata)], [program])[0].outcome


@pytest.mark.parametrize("name", FORGED)
def test_the_protocol_gives_no_more_than_a_function_does(grader: CodeGrader, name: str) -> None:
    assert outcome(grader, "assert set(f([1, 2])) == set([3, 4])", FORGED[name]) is Outcome.WRONG
    assert outcome(grader, "assert sorted(f([1, 2])) == sorted([3, 4])", FORGED[name], "f") is Outcome.WRONG


def test_a_module_that_the_sandbox_lacks_is_not_taken_from_the_program(grader: CodeGrader) -> None:
    program = "class np:\n    allclose = lambda *a: True\ndef f(): return 0"
    assert outcome(grader, "assert np.allclose(f(), 2.5)", program) is not Outcome.RIGHT


@pytest.mark.parametrize(
    "tests", ["assert True", "assert sqrt(4) == abs(-2)", "def check(candidate):\n    assert candidate(1)"]
)
def test_tests_that_use_nothing_of_the_program_are_ungradable(grader: CodeGrader, tests: str) -> None:
    assert outcome(grader, tests, "def f(): return 0") is Outcome.UNGRADABLE
    assert outcome(grader, tests, "def f(): return 0", "f") is Outcome.UNGRADABLE


def test_expected_exceptions_still_count(grader: CodeGrader) -> None:
    tests = "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False"
    assert outcome(grader, tests, "def f(x): raise ValueError") is Outcome.RIGHT


def test_names_are_sorted_by_the_tests_alone() -> None:
    names = undefined("assert math.isclose(f(x), 2) and Counter(g()) == {}\nassert len(f(1)) == LIMIT\nx = 3")
    assert names.program == {"f", "g", "LIMIT"}
    assert names.called == {"f", "g"}
    assert names.standard == {"math": ("math", None), "Counter": ("collections", "Counter")}
    # What the tests bind is theirs, and so is a parameter of the same name only inside of its function.
    assert undefined("def check(f):\n    assert f(1)\ncheck(f)").program == {"f"}
    assert undefined("f = lambda x: x\nassert f(1)").program == frozenset()
    assert undefined("import queue\nassert queue.Queue and f(1)").standard == {}
    assert undefined("assert f(1)", given=["f"]).program == frozenset()
    assert undefined("assert f(1)", given=["f"], entry_point="f").program == {"f"}
    assert undefined("assert sum(10, 15) == 6").program == {"sum"}
    assert undefined("assert sum(10, 15) == abs(-6)").program == frozenset()
    assert undefined("assert __builtins__ and __import__('os') and f(1)").program == {"f"}
