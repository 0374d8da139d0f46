"""Majority voting against clusters made by hand."""

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.baselines.votes import Equivalences, Vote, cluster, program_inputs, vote
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code import CodeGrader
from tests.grading.sandbox_package import needs_sandbox
from tests.tables import EVERY


def by_value(pairs):
    return [float(a) == float(b) for a, b in pairs]


@pytest.mark.parametrize(
    ("finals", "clusters", "expected"),
    [
        (["1", "1.0", "2", "1"], [0, 0, 1, 0], Vote(0, 0.75)),
        (["2", "1", "1.0", "3"], [0, 1, 1, 2], Vote(1, 0.5)),
        (["2", "1", "1.0", "2.0"], [0, 1, 1, 0], Vote(0, 0.5)),  # a tie: the cluster that appeared first
        (["1", "2", "3"], [0, 1, 2], Vote(0, 1 / 3)),
        (["7"], [0], Vote(0, 1.0)),
        ([None, "5", None, "5.0"], [None, 0, None, 0], Vote(1, 0.5)),  # no answer counts in the denominator
        ([None, None], [None, None], Vote(0, 0.0)),
    ],
)
def test_hand_made_votes(finals, clusters, expected):
    assert cluster(finals, by_value) == clusters
    assert vote(clusters) == expected


@pytest.mark.parametrize(
    ("clusters", "weights", "expected"),
    [
        ([0, 0, 1], [0.2, 0.3, 0.9], Vote(2, 0.9 / 1.4)),  # the confident one wins against the majority
        ([0, 1, None], [0.5, 0.25, 0.25], Vote(0, 0.5)),
        ([0, 1], [0.0, 0.0], Vote(0, 0.0)),
    ],
)
def test_weighted_votes(clusters, weights, expected):
    assert vote(clusters, weights) == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.randoms())
def test_the_share_does_not_depend_on_the_order(values, random_state):
    finals = [str(v) for v in values]
    shuffled = random_state.sample(finals, len(finals))
    one, other = (vote(cluster(texts, by_value)) for texts in (finals, shuffled))
    assert one.share == other.share == max(finals.count(f) for f in finals) / len(finals)
    assert finals.count(finals[one.winner]) == shuffled.count(shuffled[other.winner])


def record(category, dataset, **metadata):
    return Record("r", dataset, category, "q", "", metadata=metadata)


def test_each_category_has_its_own_equivalence():
    with closing(Equivalences()) as equivalences:
        exact, factual = record("math", "arithmetic"), record("factual", "triviaqa", aliases=["x"])
        assert equivalences.final_answers(exact, [" 64 ", ""]) == ["64", None]
        assert equivalences.same(exact, [("64", "64"), ("64", "46")]) == [True, False]
        assert equivalences.same(factual, [("The Beatles", "beatles"), ("Paris", "Rome")]) == [True, False]
        assert equivalences.same(record("factual", "simpleqa"), [("Paris.", "paris")]) == [True]
        math = record("math", "gsm8k")
        one, same, other = equivalences.final_answers(math, [r"so \boxed{1/2}", r"\boxed{0.5}", r"\boxed{2}"])
        assert equivalences.same(math, [(one, same), (one, other)]) == [True, False]


ASSERTS = {"kind": "asserts", "code": "assert add(1, 2) == 3\nassert add(-1, 5) == 4\n", "entry_point": None}


_CHECK = "def check(candidate):\n    assert candidate([1]) == 2\n    for i in range(3):\n        assert candidate(i)\n"
_WRAPPED = "import math\nassert set(f([1])) == {2}\nassert sorted([3]) == f(x=[3, 1])\nassert math.floor(f(2)) == 2"


@pytest.mark.parametrize(
    ("code", "entry_point", "calls"),
    [
        (ASSERTS["code"], None, ["add(1, 2)", "add(-1, 5)"]),
        (_CHECK, "f", ["f([1])"]),
        (_WRAPPED, None, ["f([1])", "f(x=[3, 1])", "f(2)"]),  # what is around a call is none of the program's
    ],
)
def test_the_inputs_of_tests_are_found_without_their_outputs(code, entry_point, calls):
    tests = {"kind": "asserts", "code": code, "entry_point": entry_point}
    assert program_inputs(record("code", "mbpp", tests=tests)) == [{"call": call} for call in calls]


@needs_sandbox
def test_programs_without_a_plain_call_in_their_tests_agree_by_their_text():
    """HumanEval encodes a value it made before it calls the program."""
    check = "def check(candidate):\n    for x in ['a', 'b']:\n        assert candidate(x + x) == x\n"
    code = record("code", "humaneval", tests={"kind": "asserts", "code": check, "entry_point": "f"})
    assert program_inputs(code) == []
    with closing(Equivalences()) as equivalences:
        pairs = [("def f(x): return x", "def f(x): return x"), ("def f(x): return x", "def f(y): return y")]
        assert equivalences.same(code, pairs) == [True, False]


@pytest.fixture(scope="module")
def programs():
    with closing(Equivalences()) as equivalences:
        equivalences.graders["code"] = CodeGrader(workers=2, seconds=1.0)
        yield equivalences


SETS = {"kind": "asserts", "code": "assert set(f([1, 2, 3])) == set([2, 3])\n", "entry_point": None}


# The bodies of two functions, and whether the functions are the same.
BODIES = [
    ("return None", "return x[1:]", False),
    ("return x[1:]", "return [i for i in x if i > 1]", True),
    ("return {3, 2}", "return {2, 3}", True),
    ("return {'a': 1, 'b': 2}", "return {'b': 2, 'a': 1}", True),
    ("return (1, 2)", "return [1, 2]", False),
    ("return iter(x)", "yield from x", True),
    ("return 1", "return True", False),
    ("raise ValueError('a')", "raise ValueError('b')", True),
    ("raise ValueError('a')", "raise KeyError('a')", False),
    ("return object()", "return object() ", False),
    ("return int", "return str", False),
    # Nothing that a program does to Python, or says of itself, makes it another's equal.
    ("return Same()", "return x[1:]", False),
    ("import builtins; builtins.repr = lambda v: ''; return 1", "return 2", False),
    ("import os; os._exit(0)", "import os; os._exit(0) ", False),
    ("while True: pass", "while True: pass ", False),
]


@needs_sandbox
@pytest.mark.parametrize("every", EVERY)
def test_functions_are_the_same_if_their_outputs_are(programs, every):
    head = "class Same:\n    def __eq__(self, other): return True\n    def __repr__(self): return '[2, 3]'\n"
    rows = BODIES[::every]
    pairs = [tuple(f"{head}def f(x):\n    {body}" for body in bodies) for *bodies, _ in rows]
    found = programs.same(record("code", "mbpp", tests=SETS), pairs)
    assert [row for row, same in zip(rows, found, strict=True) if same != row[2]] == []


@needs_sandbox
def test_each_program_of_a_vote_runs_once(programs, monkeypatch):
    jobs = []
    grader = programs.graders["code"]
    outputs = grader.outputs
    monkeypatch.setattr(grader, "outputs", lambda some: jobs.extend(some) or outputs(some))
    question = record("code", "mbpp", tests=SETS)
    finals = [f"def f(x): return {n}" for n in (1, 1, 2, 3)] + ["def f(x): return 1 + 1"]
    assert cluster(finals, lambda pairs: programs.same(question, pairs)) == [0, 0, 1, 2, 1]
    assert len(jobs) == 4


@needs_sandbox
def test_programs_are_the_same_if_their_outputs_are(programs):
    good, other = "def add(a, b):\n    return a + b", "def add(x, y):\n    return sum([y, x])"
    wrong = "def add(a, b):\n    return a - b"
    broken = "def add(a, b):\n    return c"
    question = record("code", "mbpp", tests=ASSERTS)
    assert programs.final_answers(question, ["x" * 1_000_001]) == [None]
    assert programs.final_answers(question, [f"```python\n{good}\n```", ""]) == [good, None]
    pairs = [(good, other), (good, wrong), (wrong, wrong.replace("a - b", "-(b - a)")), (good, broken)]
    # Two wrong programs that agree are the same: the expected outputs play no part.
    assert programs.same(question, pairs) == [True, False, True, False]
    echo = {"kind": "stdio", "cases": [{"input": "3\n", "output": "?"}]}
    pairs = [("print(int(input()) * 2)", "n = input()\nprint(int(n) + int(n))"), ("print(1)", "print(2)")]
    assert programs.same(record("code", "taco", tests=echo), pairs) == [True, False]
    call = {"kind": "call", "entry_point": "add", "cases": [{"arguments": [1, 2], "expected": 0}]}
    assert programs.same(record("code", "taco", tests=call), [(good, other), (good, wrong)]) == [True, False]
