"""Do two programs give the same outputs on the inputs of a record's tests?  Expected outputs are never looked at.

Both programs run in the code grader's sandbox: a test is written that calls one and the other on every input and
asserts that the results look the same.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.programs import build_job, extract_program
from coca_mindspeed.grading.verdict import Grader

# Runs one program on one input; what it raises is its result, as far as the kind of the error goes.
_HARNESS = """
import contextlib, io, sys
def _result(source, call, arguments, stdin):
    names = {"__name__": "__main__" if stdin is not None else "program"}
    written = io.StringIO()
    sys.stdin = io.StringIO(stdin or "")
    try:
        with contextlib.redirect_stdout(written):
            exec(compile(source, "program", "exec"), names)
            if call is not None:
                return repr(eval(call, names) if arguments is None else names[call](*arguments))
    except SystemExit:
        pass
    except Exception as error:
        return "raises " + type(error).__name__
    return [line.rstrip() for line in written.getvalue().strip().splitlines()]
for _call, _arguments, _stdin in INPUTS:
    assert _result(FIRST, _call, _arguments, _stdin) == _result(SECOND, _call, _arguments, _stdin)
"""


class SamePrograms:
    """Compares programs by what they give."""

    def __init__(self, grader: Grader) -> None:
        """Use the code grader ``grader``; it stays the caller's to close."""
        self._grader = grader

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [extract_program(answer).strip("\n") or None for answer in answers]

    def same(self, record: Record, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the programs of each pair agree on every input of the record's tests.

        Raises:
            DataError: the tests show no input on which programs could be compared.
        """
        inputs = test_inputs(record)
        tasks = [self._comparison(record, first, second, inputs) for first, second in pairs]
        return [verdict.correct for verdict in self._grader.grade(tasks, ["pass"] * len(tasks))]

    def _comparison(self, record: Record, first: str, second: str, inputs: Sequence[Any]) -> Record:
        sources = [build_job(record, program)["source"] for program in (first, second)]
        code = f"FIRST = {sources[0]!r}\nSECOND = {sources[1]!r}\nINPUTS = {inputs!r}\n{_HARNESS}"
        metadata = {key: value for key, value in record.metadata.items() if key not in ("prompt", "tests")}
        return replace(record, metadata={**metadata, "tests": {"kind": "asserts", "code": code}})


def test_inputs(record: Record) -> list[tuple[str | None, list[Any] | None, str | None]]:
    """Each input of the record's tests as (call or function's name, arguments, standard input).

    Raises:
        DataError: there is none.
    """
    tests: Mapping[str, Any] = record.metadata.get("tests") or {}
    kind = tests.get("kind")
    if kind == "stdio":
        return [(None, None, case["input"]) for case in tests["cases"]]
    if kind == "call":
        return [(tests["entry_point"], case["arguments"], None) for case in tests["cases"]]
    calls = _calls(str(tests.get("code", "")), tests.get("entry_point"))
    if not calls:
        raise DataError(
            f"record {record.id!r} of {record.dataset!r}: its tests show no call of the program with plain values, so "
            "two programs cannot be compared; leave it out of majority voting"
        )
    return [(call, None, None) for call in calls]


test_inputs.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of the name


def _calls(code: str, entry_point: str | None) -> list[str]:
    """Calls of the program in the asserts of test code, as expressions that stand alone.

    HumanEval calls the program ``candidate``; where no entry point is named, every function that an assert calls
    and that is neither built in nor a method is the program's.
    """
    found: dict[str, None] = {}
    for statement in ast.walk(ast.parse(code)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not _plain(node):
                continue
            name = node.func.id
            if name in ("candidate", entry_point) or (entry_point is None and name not in dir(__builtins__)):
                call = ast.Call(ast.Name(entry_point or name, ast.Load()), node.args, node.keywords)
                found[ast.unparse(call)] = None
    return list(found)


def _plain(call: ast.Call) -> bool:
    """Whether the arguments are values that need no other name."""
    inner = [node for argument in (*call.args, *call.keywords) for node in ast.walk(argument)]
    return not any(isinstance(node, ast.Name | ast.Call | ast.Lambda) for node in inner)
