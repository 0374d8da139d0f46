"""What the reward manager tells the trainer about one response, in values that verl carries and dumps as they are."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.predictions import Prediction, prediction_from_json
from coca_mindspeed.grading.math.restated import EvaluatedOnly
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.scoring.responses import ResponseJudge
from coca_mindspeed.scoring.rows import predictions


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One judged response.

    Attributes:
        prediction: the response as an evaluation sees it; ``correct`` is the grader's verdict, None where ungradable.
        trained: the verdict that training rewards, which may be stricter (``coca.require_evaluated``).
        confidence_tokens: tokens up to the end of the stated confidence, or those that stand in for it.  Those of the
            confidence *segment*, 0 for RLCR, travel apart: :data:`.segment_loss.CONFIDENCE_SEGMENT_TOKENS`.
    """

    prediction: Prediction
    trained: Verdict
    confidence_tokens: int

    def columns(self) -> dict[str, Any]:
        """As verl's ``reward_extra_info``; ``acc`` is the name by which verl's own validation finds an accuracy.

        verl's accuracy knows no third state: there an ungradable answer counts as wrong.
        """
        return {
            "acc": float(bool(self.prediction.correct)),
            "prediction": asdict(self.prediction),
            "verdict": self.trained.outcome.value,
            "reason": self.trained.reason,
            "confidence_tokens": self.confidence_tokens,
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], where: str) -> "JudgedRow":
        """Back from verl.

        Raises:
            TrainingError: another reward manager wrote them.
        """
        if missing := {"prediction", "verdict", "reason", "confidence_tokens"} - columns.keys():
            raise TrainingError(
                f"{where}: no {min(missing)!r} in verl's reward_extra_info {sorted(columns)}: is "
                "reward.reward_manager.name=coca?"
            )
        return cls(
            prediction_from_json(columns["prediction"], where),
            Verdict(Outcome(columns["verdict"]), columns["reason"]),
            int(columns["confidence_tokens"]),
        )


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
