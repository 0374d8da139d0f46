"""MBPP and HumanEval for OpenCompass, graded in this project's sandbox.

OpenCompass runs the model's programs in its own process.  Program extraction and MBPP's type-aware comparison are
OpenCompass's own.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from opencompass.datasets import MBPPEvaluator
from opencompass.openicl.icl_evaluator import BaseEvaluator
from opencompass.registry import ICL_EVALUATORS
from opencompass.utils.code_execution import TYPE_AWARE_EQUAL_NAME, make_assertions_type_aware, type_aware_equal

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.verdict import Outcome


def _result(records: Sequence[Record], programs: Sequence[str]) -> dict[str, Any]:
    """Grade in the sandbox; the result has the form of OpenCompass's evaluators."""
    grader = CodeGrader()
    try:
        verdicts = grader.grade(records, programs)
    finally:
        grader.close()
    for record, verdict in zip(records, verdicts, strict=True):
        if verdict.outcome is Outcome.UNGRADABLE:  # OpenCompass has no such verdict
            raise GradingError(f"question {record.id!r} of {record.dataset!r} cannot be graded: {verdict.reason}")
    details = [
        {"programs": program, "correct": verdict.correct, "result": verdict.reason or verdict.outcome.value}
        for program, verdict in zip(programs, verdicts, strict=True)
    ]
    return {"accuracy": 100 * sum(v.correct for v in verdicts) / max(1, len(verdicts)), "details": details}


@ICL_EVALUATORS.register_module()
class SandboxedMBPPEvaluator(BaseEvaluator):
    """OpenCompass's ``MBPPEvaluator``, with the programs run in the sandbox."""

    def score(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Grade answers to MBPP questions; a reference is the question's asserts."""
        stock = MBPPEvaluator()
        # OpenCompass's comparison is part of the tests, which run inside the sandbox.
        imports = "from collections.abc import Mapping\nfrom typing import Any\n"
        comparison = f"{imports}{inspect.getsource(type_aware_equal)}\n{TYPE_AWARE_EQUAL_NAME} = type_aware_equal\n"
        records = []
        for index, tests in enumerate(references):
            code = {"kind": "asserts", "code": comparison + make_assertions_type_aware(tests)}
            records.append(Record(str(index), "mbpp_sanitized", "code", "MBPP", "", metadata={"tests": code}))
        return _result(records, [stock._process_answer(answer) for answer in predictions])


@ICL_EVALUATORS.register_module()
class SandboxedHumanEvalEvaluator(BaseEvaluator):
    """HumanEval's check functions, run in the sandbox on a whole function or on the completion of the prompt's."""

    def score(self, predictions: list[str], references: list[str], test_set: Any) -> dict[str, Any]:
        """Grade answers to HumanEval questions, whose prompts and tests are in ``test_set``."""
        records = []
        for task, question in zip(references, test_set, strict=True):
            entry_point, prompt = question["entry_point"], question["prompt"]
            code = f"{question['test']}\n\ncheck({entry_point})\n"
            tests = {"kind": "asserts", "code": code, "entry_point": entry_point}
            metadata = {"prompt": prompt, "tests": tests}
            records.append(Record(task, "humaneval", "code", prompt, "", metadata=metadata))
        return _result(records, predictions)
