"""Scores responses that arrive one by one in batches, and reports on each in values that verl can dump as JSON."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.scoring.responses import ResponseScorer, held_out_predictions
from coca_mindspeed.scoring.rollout import Sampled
from coca_mindspeed.verl.batch import score_rows

_BATCH = 512
# One response alone costs a millisecond, in a batch a tenth of that; the responses of a group arrive close together.
GATHERING_SECONDS = 0.02


class _Waiting(NamedTuple):
    token_ids: Tensor
    record: Record
    result: "asyncio.Future[dict[str, Any]]"


class ScoringQueue:
    """Scores together the responses that arrive together, in one thread, since graders are not thread-safe.

    ``method`` names the training method in the predictions.
    """

    def __init__(self, scorer: ResponseScorer, method: str) -> None:
        self._scorer, self._method = scorer, method
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")

    async def score(self, token_ids: Tensor, record: Record) -> dict[str, Any]:
        """Score one response: int ``[tokens]``, without padding.

        Returns:
            ``reward_score``, 1 for an answer that training rewards, else 0; and ``reward_extra_info``:
            ``prediction``, the fields of a :class:`Prediction`, whose ``correct`` is the grader's verdict;
            ``verdict`` and ``reason`` as training rewards it (may be stricter: ``coca.require_evaluated``); the columns
            of :data:`SCORE_COLUMNS`; and ``acc``, the name by which verl's validation finds an accuracy, in which an
            ungradable answer counts as wrong.
        """
        result = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(token_ids.to("cpu", torch.int64), record, result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._score_waiting())
        report: dict[str, Any] = await result
        return report

    def close(self) -> None:
        """Finish the batch being scored, and release the grader."""
        self._thread.shutdown(wait=True)
        self._scorer.grader.close()

    async def _score_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if len(self._waiting) < _BATCH:
                await asyncio.sleep(GATHERING_SECONDS)
            taken, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            batch = [each for each in taken if not each.result.done()]  # a failed session cancels its request
            if not batch:
                continue
            try:
                reports = await loop.run_in_executor(self._thread, self._reports, batch)
            except Exception as failure:  # noqa: BLE001  raised again by each request
                for each in batch:
                    if not each.result.done():
                        each.result.set_exception(failure)
                continue
            for each, report in zip(batch, reports, strict=True):
                if not each.result.done():
                    each.result.set_result(report)

    def _reports(self, batch: Sequence[_Waiting]) -> list[dict[str, Any]]:
        lengths = torch.tensor([len(each.token_ids) for each in batch])
        records = [each.record for each in batch]
        token_ids = pad_sequence([each.token_ids for each in batch], batch_first=True)
        graded = self._scorer(Sampled(token_ids=token_ids, lengths=lengths), records)
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
