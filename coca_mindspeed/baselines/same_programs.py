"""Do two programs give the same outputs on the inputs of a record's tests?  Expected outputs are never looked at.

Each program runs alone in the code grader's sandbox, once; what it gives is compared outside, so that no program can
say that it equals another.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.extraction import MAX_ANSWER_CHARACTERS, build_job, extract_program, wanted_names
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.code.inside.names import undefined

Outputs = tuple[str | None, ...]


class SamePrograms:
    """Compares programs by what they give."""

    def __init__(self, grader: CodeGrader) -> None:
        """Use the code grader ``grader``; it stays the caller's to close."""
        self._grader = grader
        # Of the last record alone: a vote asks about one record after the other.
        self._record: Record | None = None
        self._known: dict[str, Outputs] = {}

    def final_answers(self, record: Record, answers: Sequence[str]) -> list[str | None]:
        wanted = wanted_names(record)
        return [
            extract_program(answer, wanted).strip("\n") or None if len(answer) <= MAX_ANSWER_CHARACTERS else None
            for answer in answers
        ]

    def same(self, record: Record, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the programs of each pair agree on every input of the record's tests.

        A program that gives nothing that can be compared on some input (it took too long, or its result is an object)
        agrees with none.  Where the tests show no call with plain values (HumanEval has three such), programs agree
        whose text is the same.

        Raises:
            GradingError: a program could not be run.
        """
        if record is not self._record:
            self._record, self._known = record, {}
        inputs = test_inputs(record)
        if not inputs:
            return [first == second for first, second in pairs]
        new = [program for program in dict.fromkeys(sum(pairs, ())) if program not in self._known]
        outputs = self._grader.outputs([self._job(record, program, inputs) for program in new])
        self._known |= dict(zip(new, outputs, strict=True))
        return [_agree(self._known[first], self._known[second]) for first, second in pairs]

    def _job(self, record: Record, program: str, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "kind": "outputs",
            "source": build_job(record, program)["source"],
            "entry_point": record.metadata["tests"].get("entry_point"),
            "inputs": inputs,
            # As the tests themselves compare them.
            "tuples_are_lists": record.metadata["tests"]["kind"] == "call",
        }


def _agree(first: Outputs, second: Outputs) -> bool:
    return None not in first and first == second


def test_inputs(record: Record) -> list[dict[str, Any]]:
    """Each input of the record's tests: ``stdin``, or a ``call``, or a ``function`` with its ``arguments``."""
    tests: Mapping[str, Any] = record.metadata.get("tests") or {}
    kind = tests.get("kind")
    if kind == "stdio":
        return [{"stdin": case["input"]} for case in tests["cases"]]
    if kind == "call":
        return [{"function": tests["entry_point"], "arguments": case["arguments"]} for case in tests["cases"]]
    return [{"call": call} for call in _calls(str(tests.get("code", "")), tests.get("entry_point"))]


test_inputs.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of the name


def _calls(code: str, entry_point: str | None) -> list[str]:
    """Calls of the program in the asserts of test code, as expressions that stand alone.

    HumanEval calls the program ``candidate``; where no entry point is named, a function is the program's if the grader
    would take it from the program.
    """
    called = {entry_point, "candidate"} if entry_point else undefined(code).called
    found: dict[str, None] = {}
    for statement in ast.walk(ast.parse(code)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _plain(node):
                name = node.func.id
                if name in called:
                    call = ast.Call(ast.Name(entry_point or name, ast.Load()), node.args, node.keywords)
                    found[ast.unparse(call)] = None
    return list(found)


def _plain(call: ast.Call) -> bool:
    """Whether the arguments are values that need no name: those that ``ast.literal_eval`` reads."""
    try:
        for argument in call.args:
            ast.literal_eval(argument)
        for keyword in call.keywords:
            ast.literal_eval(keyword.value)
    except ValueError:
        return False
    return all(keyword.arg is not None for keyword in call.keywords)
