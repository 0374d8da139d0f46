"""Scores responses that arrive one by one in batches, and reports on each in values that verl can dump as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor

from coca_mindspeed.data.records import Record
from coca_mindspeed.scoring.responses import ResponseScorer, held_out_predictions
from coca_mindspeed.scoring.rollout import Sampled
from coca_mindspeed.utils.gathering import GatheringQueue
from coca_mindspeed.verl.batch import score_rows


class _Response(NamedTuple):
    token_ids: Tensor
    record: Record


class ScoringQueue:
    """Scores together the responses that arrive together, in one thread, since graders are not thread-safe.

    One response alone costs a millisecond, in a batch a tenth of that.  ``method`` names the training method in the
    predictions.
    """

    def __init__(self, scorer: ResponseScorer, method: str) -> None:
        self._scorer, self._method = scorer, method
        self._queue: GatheringQueue[_Response, dict[str, Any]] = GatheringQueue(self._reports, "scoring")

    async def score(self, token_ids: Tensor, record: Record) -> dict[str, Any]:
        """Score one response: int ``[tokens]``, without padding.

        Returns:
            ``reward_score``, 1 for an answer that training rewards, else 0; and ``reward_extra_info``:
            ``prediction``, the fields of a :class:`Prediction`, whose ``correct`` is the grader's verdict;
            ``verdict`` and ``reason`` as training rewards it (may be stricter: ``coca.require_evaluated``); the columns
            of :data:`SCORE_COLUMNS`; and ``acc``, the name by which verl's validation finds an accuracy, in which an
            ungradable answer counts as wrong.
        """
        return await self._queue(_Response(token_ids, record))

    def close(self) -> None:
        """Finish the batch being scored, and release the grader."""
        self._queue.close()
        self._scorer.grader.close()

    def _reports(self, batch: Sequence[_Response]) -> list[dict[str, Any]]:
        records = [each.record for each in batch]
        graded = self._scorer(Sampled.of_responses(each.token_ids for each in batch), records)
        predictions, rewarded = held_out_predictions(graded, self._method), self._scorer.for_training(graded)
        reports = []
        for prediction, verdict, scores in zip(predictions, rewarded.verdicts, score_rows(rewarded), strict=True):
            report = {
                "acc": float(bool(prediction.correct)),
                "prediction": asdict(prediction),
                "verdict": verdict.outcome.value,
                "reason": verdict.reason,
                **scores,
            }
            reports.append({"reward_score": float(verdict.correct), "reward_extra_info": report})
        return reports
