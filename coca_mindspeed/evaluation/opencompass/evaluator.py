"""An OpenCompass evaluator around any other: it takes the confidence off, has the answer graded, and scores both.

OpenCompass applies a data set's ``pred_postprocessor`` before the evaluator sees anything, which would strip the
confidence with the rest.  The wrapped configuration therefore moves it inside (see :mod:`.config`), and this
evaluator gets the raw response.
"""

from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from coca_mindspeed.algorithm.parsing import ConfidencePosition, ResponseParser
from coca_mindspeed.errors import DataError, MissingDependencyError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.specs import CATALOGUE, HEADLINE_METRICS
from coca_mindspeed.evaluation.opencompass.output import correctness
from coca_mindspeed.evaluation.tokens import TokenCounter, confidence_end

try:
    from opencompass.openicl.icl_evaluator import BaseEvaluator
    from opencompass.registry import ICL_EVALUATORS, TEXT_POSTPROCESSORS
except ImportError as error:
    raise MissingDependencyError(
        f"OpenCompass cannot be imported ({error}); it needs its own environment, requirements/opencompass.txt"
    ) from error

# Percent where OpenCompass writes percent; the same names for every model, NaN where undefined.
PERCENT = tuple(name for name in HEADLINE_METRICS if CATALOGUE[name].percent)


@ICL_EVALUATORS.register_module()
class ConfidenceEvaluator(BaseEvaluator):
    """Grades answers with the data set's own evaluator and confidences against its verdicts.

    Args:
        evaluator: configuration of the data set's evaluator.
        answer_postprocessor: the data set's ``pred_postprocessor``, applied to the answer without its confidence.
        position: where the confidence stands: ``first``, or ``last`` for answer-first methods.
        decimals: see :class:`ResponseParser`.
        tokenizer_path: directory of the model's tokenizer, which counts tokens to confidence; None leaves them NaN.
    """

    def __init__(
        self,
        evaluator: dict[str, Any],
        answer_postprocessor: dict[str, Any] | None = None,
        position: ConfidencePosition = "first",
        decimals: int | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        super().__init__()
        self._evaluator = evaluator
        self._answer_postprocessor = answer_postprocessor
        self._parser = ResponseParser(position, decimals)
        self._counter = None if tokenizer_path is None else TokenCounter(Path(tokenizer_path))

    # OpenCompass reads this signature to decide what to pass to `evaluate`.
    def score(self, predictions: list[str], references: list[Any], test_set: Any) -> dict[str, Any]:
        """Score one sample of every question; see :meth:`evaluate`."""
        return self.evaluate(1, 1, test_set, predictions=predictions, references=references, test_set=test_set)

    def evaluate(self, k: int | list[int], n: int, original_dataset: Any, **columns: Any) -> dict[str, Any]:
        """Score n samples of every question, replica after replica.

        Metrics are over all samples together.  OpenCompass itself would average them over replicas, which for AUROC
        and ECE is another quantity, under another name.

        Raises:
            DataError: the data set's evaluator does not grade every sample.
        """
        responses: list[str] = columns["predictions"]
        if wrong := [r for r in responses if not isinstance(r, str)]:
            raise DataError(
                f"{self._name}: expected one response a question as text, found {type(wrong[0]).__name__}; repeat the "
                "questions by the data set's n, not by num_return_sequences"
            )
        if len(responses) != len(original_dataset) or len(responses) % n:
            raise DataError(f"{self._name}: {len(responses)} responses to {len(original_dataset)} questions, n = {n}")
        confidence, tokens, answers = self._take_off_confidence(responses, columns)
        size = len(responses) // n
        correct: list[bool] = []
        for replica in range(n):
            part = slice(replica * size, (replica + 1) * size)
            correct += self._grade(replica, answers[part], columns, part)
        metrics = calibration_metrics(
            np.array([np.nan if s is None else s for s in confidence], dtype=np.float64),
            np.array(correct, dtype=np.bool_),
            np.array([np.nan if t is None else t for t in tokens], dtype=np.float64),
        )
        values = metrics.values()
        result: dict[str, Any] = {name: values[name] * (100 if name in PERCENT else 1) for name in HEADLINE_METRICS}
        result["n_samples"] = metrics.n
        rows = zip(range(len(responses)), responses, confidence, answers, correct, tokens, strict=True)
        result["details"] = [
            {
                **{"question": i % size, "sample": i // size, "response": response, "answer": answer},
                **{"confidence": stated, "correct": right, "tokens_to_confidence": count},
            }
            for i, response, stated, answer, right, count in rows
        ]
        return result

    @property
    def _name(self) -> str:
        return str(getattr(self, "_out_dir", type(self).__name__))

    def _take_off_confidence(
        self, responses: Sequence[str], columns: dict[str, Any]
    ) -> tuple[list[float | None], list[int | None], list[str]]:
        """Confidence, tokens to confidence and answer segment of each response."""
        confidence: list[float | None] = []
        tokens: list[int | None] = []
        answers: list[str] = []
        for response in responses:
            parsed = self._parser(response)
            end = confidence_end(response, parsed, self._parser)
            confidence.append(parsed.confidence)
            tokens.append(None if end is None or self._counter is None else self._counter.before(response, end))
            answers.append(self._postprocess(parsed.answer))
        return confidence, tokens, answers

    def _postprocess(self, answer: str) -> str:
        if self._answer_postprocessor is None:
            return answer
        arguments = dict(self._answer_postprocessor)
        process = arguments.pop("type")
        if isinstance(process, str):
            process = TEXT_POSTPROCESSORS.get(process)
        return str(process(answer, **arguments))

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
        wanted = signature(inner.score).parameters
        if unknown := [name for name, p in wanted.items() if name not in given and p.default is p.empty]:
            raise DataError(f"{self._name}: {type(inner).__name__} also needs {unknown[0]!r}, which is not supported")
        result = inner.score(**{name: value for name, value in given.items() if name in wanted})
        return correctness(result, len(answers), f"{self._name} ({type(inner).__name__})")


@ICL_EVALUATORS.register_module()
class ExternalConfidenceEvaluator(ConfidenceEvaluator):
    """For confidences that no response states: probe, assessor, question probability, majority voting.

    Every prediction carries the keys ``confidence`` (null where there is none) and ``tokens_to_confidence`` (null
    where unknown); the response is all answer.
    """

    def score(  # type: ignore[override]  # OpenCompass passes what the signature names
        self,
        predictions: list[str],
        references: list[Any],
        test_set: Any,
        confidence: list[float | None],
        tokens_to_confidence: list[int | None],
    ) -> dict[str, Any]:
        """Score one sample of every question; see :meth:`ConfidenceEvaluator.evaluate`."""
        columns = {"confidence": confidence, "tokens_to_confidence": tokens_to_confidence}
        base = {"predictions": predictions, "references": references, "test_set": test_set}
        return self.evaluate(1, 1, test_set, **base, **columns)

    def _take_off_confidence(
        self, responses: Sequence[str], columns: dict[str, Any]
    ) -> tuple[list[float | None], list[int | None], list[str]]:
        confidence = list(columns["confidence"])
        for index, value in enumerate(confidence):
            ok = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1)
            if not ok:
                raise DataError(
                    f"{self._name}: prediction {index} has confidence {value!r}, expected null or a number in [0, 1]"
                )
        return confidence, list(columns["tokens_to_confidence"]), [self._postprocess(r) for r in responses]
