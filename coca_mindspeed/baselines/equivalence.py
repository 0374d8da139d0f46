"""Equivalence of two answers to a record, without the gold answer, by the grader of its kind of data set.

Two programs are equivalent if they give the same outputs on the inputs of the record's tests; expected outputs are
not used.  Each program runs once in the code grader's sandbox, and outputs are compared outside of it.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.extraction import MAX_ANSWER_CHARACTERS, build_job, extract_program, wanted_names
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.code.inside.names import undefined
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import Equivalence, Grader

# A judge compares with a gold answer; two answers to such a question are compared as facts.
_SUBSTITUTES = {"simpleqa": "factual"}


class Equivalences:
    """Math: symbolic; factual: normalised text; code: outputs on the tests' inputs; exact: text."""

    def __init__(self) -> None:
        self._graders: dict[str, Equivalence] = {}
        self._opened: list[Grader] = []
        self._programs: ProgramEquivalence | None = None

    def close(self) -> None:
        for grader in self._opened:
            grader.close()

    def final_answers(self, record: Record, answers: Sequence[str]) -> Sequence[str | None]:
        """Return the final answers of a record's responses, None where there is none."""
        name = grader_name(record)
        return self._code().final_answers(record, answers) if name == "code" else self._of(name).final_answers(answers)

    def same(self, record: Record, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Whether the final answers of each pair are equivalent."""
        name = grader_name(record)
        return self._code().same(record, pairs) if name == "code" else self._of(name).equivalent(pairs)

    def _of(self, name: str) -> Equivalence:
        if name not in self._graders:
            grader = build_grader(_SUBSTITUTES.get(name, name))
            assert isinstance(grader, Equivalence), f"the grader {name} cannot compare two answers"
            self._opened.append(grader)
            self._graders[name] = grader
        return self._graders[name]

    def _code(self) -> "ProgramEquivalence":
        if self._programs is None:
            grader = build_grader("code")
            assert isinstance(grader, CodeGrader)
            self._opened.append(grader)
            self._programs = ProgramEquivalence(grader)
        return self._programs


class ProgramEquivalence:
    """Compares programs by their outputs; the caller closes ``grader``."""

    def __init__(self, grader: CodeGrader) -> None:
        self._grader = grader
        # Outputs of the last record's programs: a vote asks about one record after the other.
        self._record: Record | None = None
        self._outputs: dict[str, tuple[str | None, ...]] = {}

    def final_answers(self, record: Record, answers: Sequence[str]) -> list[str | None]:
        """Return the programs of a record's responses, None where there is none."""
        wanted = wanted_names(record)
        return [
            extract_program(answer, wanted).strip("\n") or None if len(answer) <= MAX_ANSWER_CHARACTERS else None
            for answer in answers
        ]

    def same(self, record: Record, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the programs of each pair agree on every input of the record's tests.

        A program without a comparable output on some input (a timeout, or an object as result) agrees with none.
        Without a test input of plain values (three tasks of HumanEval), programs of equal text agree.

        Raises:
            GradingError: a program could not be run.
        """
        if record is not self._record:
            self._record, self._outputs = record, {}
        inputs = program_inputs(record)
        if not inputs:
            return [first == second for first, second in pairs]
        new = [program for program in dict.fromkeys(sum(pairs, ())) if program not in self._outputs]
        tests = record.metadata["tests"]
        jobs = [
            {
                "kind": "outputs",
                "source": build_job(record, program)["source"],
                "entry_point": tests.get("entry_point"),
                "inputs": inputs,
                "tuples_are_lists": tests["kind"] == "call",  # as the tests compare them
            }
            for program in new
        ]
        self._outputs |= dict(zip(new, self._grader.outputs(jobs), strict=True))
        outputs = [(self._outputs[first], self._outputs[second]) for first, second in pairs]
        return [None not in first and first == second for first, second in outputs]


def program_inputs(record: Record) -> list[dict[str, Any]]:
    """Return each input of the record's tests: ``stdin``, a ``call``, or a ``function`` with its ``arguments``."""
    tests: Mapping[str, Any] = record.metadata.get("tests") or {}
    kind = tests.get("kind")
    if kind == "stdio":
        return [{"stdin": case["input"]} for case in tests["cases"]]
    if kind == "call":
        return [{"function": tests["entry_point"], "arguments": case["arguments"]} for case in tests["cases"]]
    return [{"call": call} for call in _calls(str(tests.get("code", "")), tests.get("entry_point"))]


def _calls(code: str, entry_point: str | None) -> list[str]:
    """Calls of the program in the asserts of test code, as self-contained expressions.

    HumanEval calls the program ``candidate``; without an entry point, the program's functions are the undefined names
    that are called.
    """
    called = {entry_point, "candidate"} if entry_point else undefined(code).called
    asserts = [node.test for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
    found: dict[str, None] = {}
    for node in (node for test in asserts for node in ast.walk(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called and _plain(node):
            call = ast.Call(ast.Name(entry_point or node.func.id, ast.Load()), node.args, node.keywords)
            found[ast.unparse(call)] = None
    return list(found)


def _plain(call: ast.Call) -> bool:
    """Whether all arguments are literals."""
    try:
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(value)
    except ValueError:
        return False
    return all(keyword.arg is not None for keyword in call.keywords)
