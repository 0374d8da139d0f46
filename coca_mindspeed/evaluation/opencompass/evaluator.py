"""Evaluators that OpenCompass loads: answers graded without their confidence, and programs run in our sandbox.

OpenCompass applies a data set's ``pred_postprocessor`` before the evaluator, which would remove the confidence.  The
configuration therefore moves it inside (see :mod:`.config`), and the evaluator gets the raw response.  OpenCompass runs
the model's programs in its own process; program extraction and MBPP's type-aware comparison are OpenCompass's own.
"""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from coca_mindspeed.algorithm.parsing import ConfidencePosition, ResponseParser
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError, MissingDependencyError
from coca_mindspeed.evaluation.adapters import correctness
from coca_mindspeed.evaluation.metrics import HEADLINE_METRICS, METRIC_SPECS, calibration_metrics
from coca_mindspeed.grading.code import CodeGrader
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.utils.tokenization import TokenCounter, parse_and_count

try:
    from opencompass.datasets import MBPPEvaluator
    from opencompass.openicl.icl_evaluator import BaseEvaluator
    from opencompass.registry import ICL_EVALUATORS, TEXT_POSTPROCESSORS
    from opencompass.utils.code_execution import TYPE_AWARE_EQUAL_NAME, make_assertions_type_aware, type_aware_equal
except ImportError as error:
    raise MissingDependencyError(
        f"OpenCompass cannot be imported ({error}); it needs its own environment, requirements/opencompass.txt"
    ) from error


@ICL_EVALUATORS.register_module()
class ConfidenceEvaluator(BaseEvaluator):
    """Grades answers with the data set's own evaluator, and confidences against its verdicts.

    ``answer_postprocessor`` is the data set's ``pred_postprocessor``, applied to the answer without its confidence;
    ``tokenizer_path`` names the tokenizer that counts tokens to confidence (None: NaN), ``question_column`` the column
    of the data set that is shown in reports, ``decimals`` those of a confidence, ``form`` the digest of the prompts',
    ``thinking`` says that the confidence begins a thought, which the postprocessor does not get.
    """

    def __init__(
        self,
        evaluator: dict[str, Any],
        answer_postprocessor: dict[str, Any] | None = None,
        position: ConfidencePosition = "first",
        tokenizer_path: str | None = None,
        question_column: str | None = None,
        decimals: int | None = None,
        form: str | None = None,
        thinking: bool = False,
    ) -> None:
        super().__init__()
        self._evaluator, self._answer_postprocessor = evaluator, answer_postprocessor
        self._parser = ResponseParser(position, decimals, thinking)
        self._question_column, self._form = question_column, form
        self._counter = None if tokenizer_path is None else TokenCounter(Path(tokenizer_path))

    # OpenCompass reads this signature to decide what to pass to `evaluate`.
    def score(self, predictions: list[str], references: list[Any], test_set: Any) -> dict[str, Any]:
        """Score one sample of every question; see :meth:`evaluate`."""
        return self.evaluate(1, 1, test_set, predictions=predictions, references=references, test_set=test_set)

    def evaluate(self, k: int | list[int], n: int, original_dataset: Any, **columns: Any) -> dict[str, Any]:
        """Score n samples of every question, ordered replica by replica.

        Metrics are over all samples together.  OpenCompass would average them over replicas, which differs for AUROC
        and ECE.

        Raises DataError: the data set's evaluator does not grade every sample.
        """
        responses: list[str] = columns["predictions"]
        whole = len(responses) == len(original_dataset) and len(responses) % n == 0
        if not whole or not all(isinstance(response, str) for response in responses):
            raise DataError(
                f"{self._name}: expected a response of text to each of {len(original_dataset)} questions, n = {n}; "
                "repeat the questions by the data set's n, not by num_return_sequences"
            )
        counted = [parse_and_count(response, self._parser, self._counter) for response in responses]
        answers = [parsed.answer for parsed, _ in counted]
        if self._answer_postprocessor is not None:
            arguments = dict(self._answer_postprocessor)
            process = arguments.pop("type")
            if isinstance(process, str):
                process = TEXT_POSTPROCESSORS.get(process)
            answers = [str(process(answer, **arguments)) for answer in answers]
        size = len(responses) // n
        correct: list[bool] = []
        for replica in range(n):
            part = slice(replica * size, (replica + 1) * size)
            correct += self._grade(replica, answers[part], columns, part)
        metrics = calibration_metrics(
            np.array([parsed.confidence for parsed, _ in counted], dtype=np.float64),  # None becomes NaN
            np.array(correct, dtype=np.bool_),
            np.array([tokens for _, tokens in counted], dtype=np.float64),
        )
        questions = columns["test_set"][self._question_column] if self._question_column else [""] * len(responses)
        golds = columns["references"] or [None] * len(responses)
        return {
            **{name: metrics.values[name] * METRIC_SPECS[name].scale for name in HEADLINE_METRICS},
            "n_samples": metrics.n,
            "details": [
                {
                    "id": str(i % size),
                    "sample": i // size,
                    "question": str(questions[i]),
                    "gold": None if golds[i] is None else str(golds[i]),
                    "response": responses[i],
                    "answer": answers[i],
                    "confidence": parsed.confidence,
                    "confidence_after": parsed.confidence_after,
                    "correct": correct[i],
                    "tokens_to_confidence": tokens,
                    "form": self._form,
                }
                for i, (parsed, tokens) in enumerate(counted)
            ],
        }

    @property
    def _name(self) -> str:
        return str(getattr(self, "_out_dir", type(self).__name__))

    def _grade(self, replica: int, answers: list[str], columns: dict[str, Any], part: slice) -> list[bool]:
        inner = ICL_EVALUATORS.build(deepcopy(self._evaluator))
        inner._dataset_replica_idx = replica
        inner._out_dir = getattr(self, "_out_dir", None)
        references, test_set = columns["references"], columns["test_set"]
        given = {
            "predictions": inner.pred_postprocess(answers),
            "references": None if references is None else list(references)[part],
            "test_set": test_set.select(range(part.start, part.stop)),
        }
        wanted = inspect.signature(inner.score).parameters
        if unknown := [name for name, p in wanted.items() if name not in given and p.default is p.empty]:
            raise DataError(f"{self._name}: {type(inner).__name__} also needs {unknown[0]!r}, which is not supported")
        result = inner.score(**{name: value for name, value in given.items() if name in wanted})
        return correctness(result, len(answers), f"{self._name} ({type(inner).__name__})")


def _run_programs(records: Sequence[Record], programs: Sequence[str]) -> dict[str, Any]:
    """Grade in the sandbox; the result has the form of OpenCompass's evaluators."""
    grader = CodeGrader()
    try:
        verdicts = grader.grade(records, programs)
    finally:
        grader.close()
    for record, verdict in zip(records, verdicts, strict=True):
        if verdict.outcome is Outcome.UNGRADABLE:  # OpenCompass has no such verdict
            raise GradingError(f"question {record.id!r} of {record.dataset!r} cannot be graded: {verdict.reason}")
    return {"details": [{"correct": verdict.correct} for verdict in verdicts]}


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
        return _run_programs(records, [stock._process_answer(answer) for answer in predictions])


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
        return _run_programs(records, predictions)
