"""Programs that answer for the tests instead of passing them: by the protocol, by names, by how they end."""

from contextlib import closing

import pytest

from coca_mindspeed.grading.code import CodeGrader
from coca_sandbox.inside.names import undefined
from tests.grading.sandbox_attacks import read_attacks
from tests.grading.sandbox_package import needs_sandbox
from tests.grading.test_code import asserts, check_programs

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
def grader():
    with closing(CodeGrader(seconds=5.0, total_seconds=10.0, workers=2)) as grader:
        yield grader


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
    check_programs(
        grader,
        [
            *((asserts(tests, name), "def f(): return 0", "ungradable") for tests in nothing for name in (None, "f")),
            (asserts("assert np.allclose(f(), 2.5)"), lacking, "wrong"),
            (asserts(raised), "def f(x): raise ValueError", "right"),
        ],
    )


def test_names_are_sorted_by_the_tests_alone():
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
