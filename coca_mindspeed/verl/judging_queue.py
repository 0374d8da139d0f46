"""Responses that arrive one by one, judged together: a grader spreads what it is given at once over its processes."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.mathematics.evaluated import EvaluatedOnly
from coca_mindspeed.judging.held_out import predictions
from coca_mindspeed.judging.responses import ResponseJudge
from coca_mindspeed.verl.judged_row import JudgedRow

_AT_ONCE = 512  # responses judged together
# Alone a response costs a millisecond, in a crowd a tenth of it, and those of a group come one upon the other.
_GATHERING_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Waiting:
    token_ids: Tensor
    record: Record
    result: "Future[JudgedRow]"


class JudgingQueue:
    """Judges together what arrives together; one thread, since a grader is not made for several."""

    def __init__(self, judge: ResponseJudge, method: str, require_evaluated: bool) -> None:
        """Start without a response.

        Args:
            judge: of the responses; its grader never raises.
            method: name of the training method, for the predictions.
            require_evaluated: a restated question earns nothing in training.
        """
        self._judge, self._method = judge, method
        self._evaluated = EvaluatedOnly(judge.grader) if require_evaluated else None
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judging")

    def submit(self, token_ids: Tensor, record: Record) -> "Future[JudgedRow]":
        """Have one response judged.

        Args:
            token_ids: int ``[tokens]``, without padding.
            record: its question.
        """
        result: Future[JudgedRow] = Future()
        with self._lock:
            self._waiting.append(_Waiting(token_ids.to("cpu", torch.int64), record, result))
        self._thread.submit(self._judge_waiting)
        return result

    def close(self) -> None:
        """Judge what is waiting, and release the grader."""
        self._thread.shutdown(wait=True)
        self._judge.grader.close()

    def _judge_waiting(self) -> None:
        if not self._waiting:
            return  # an earlier call took it along
        if len(self._waiting) < _AT_ONCE:
            time.sleep(_GATHERING_SECONDS)
        with self._lock:
            taken, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
        # Whoever waited for it may have gone; from here on nobody can, so that each result finds its taker.
        batch = [each for each in taken if each.result.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            rows = self._rows(batch)
        except BaseException as failure:
            for each in batch:
                each.result.set_exception(failure)
            raise
        for each, row in zip(batch, rows, strict=True):
            each.result.set_result(row)

    def _rows(self, batch: Sequence[_Waiting]) -> list[JudgedRow]:
        lengths = torch.tensor([len(each.token_ids) for each in batch])
        records = [each.record for each in batch]
        judged = self._judge(pad_sequence([each.token_ids for each in batch], batch_first=True), lengths, records)
        rows = []
        for index, (record, prediction) in enumerate(zip(records, predictions(records, judged), strict=True)):
            verdict = judged.verdicts[index]
            if self._evaluated is not None:
                verdict = self._evaluated.look_again(record, judged.parsed[index].answer, verdict)
            prediction = replace(
                prediction,
                category=record.category,
                method=self._method,
                tokens=int(lengths[index]),
                gold=record.answer,
            )
            rows.append(JudgedRow(prediction, verdict, int(judged.confidence_lengths[index])))
        return rows
