"""The reward stage: right or wrong, how sure, and where the confidence ends, for every response in the dock.

It stands where MindSpeed-RL's ``RuleReward`` would, one actor on each node, with the same methods.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.math.restated import EvaluatedOnly
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.dock import Rows, batches, check_groups, put, report
from coca_mindspeed.mindspeed.stages.verifiers import build_verifier
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.start.record_files import read_run_records
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.scoring.responses import JudgedResponses, ResponseJudge, response_judge
from coca_mindspeed.utils.tokenization import token_text


class RecordLookup:
    """Finds the record of each row: by index into a file of records, or from MindSpeed-RL's own ``labels``."""

    def __init__(
        self, data_path: str, tokenizer: Any, additional_keys: Sequence[str], digests: Mapping[str, str]
    ) -> None:
        by_index = columns.RECORD in additional_keys
        self._records = read_run_records(Path(data_path), digests) if by_index else None
        self._tokenizer = tokenizer

    def __call__(self, rows: Rows) -> list[Record]:
        if self._records is not None:
            return [self._records[index] for index in rows.scalars(columns.RECORD).tolist()]
        answers = self._tokenizer.batch_decode(
            [row.tolist() for row in rows.columns["labels"]], skip_special_tokens=True
        )
        return [
            Record(id=str(index), dataset="labels", category="math", question="", answer=answer)
            for index, answer in zip(rows.indexes, answers, strict=True)
        ]


class RewardWorker:
    """The Ray actor; its methods are those that MindSpeed-RL's trainer calls."""

    _failure: BaseException | None = None

    def initialize(
        self, megatron_config: Any, rl_config: Any, tokenizer: Any, trust_remote_code: bool = False, dp_rank: int = 0
    ) -> None:
        """Build the grader and the tokenizer's table.

        MindSpeed-RL never asks whether this went well, so a failure is kept and raised by the first use.

        Args:
            megatron_config: MindSpeed-RL's; tells the data set's columns and the size of the vocabulary.
            rl_config: MindSpeed-RL's.
            tokenizer: MindSpeed-RL's wrapper of the Hugging Face tokenizer.
            trust_remote_code: not used: the tokenizer comes from the driver as it is.
            dp_rank: which node's share of the rows this actor takes, where order is guaranteed.
        """
        try:
            self._prepare(process_settings().coca, megatron_config, rl_config, tokenizer, dp_rank)
        except BaseException as failure:
            self._failure = failure
            raise

    def _prepare(self, settings: CocaSettings, megatron_config: Any, rl_config: Any, tokenizer: Any, node: int) -> None:
        self._settings = settings
        self._rl_config = rl_config
        self._global_batch_size = megatron_config.global_batch_size
        self._node = node
        self._columns = ["responses", "response_length", *megatron_config.dataset_additional_keys]
        self._tokenizer = tokenizer.tokenizer
        self._vocabulary = int(megatron_config.padded_vocab_size or 0)
        self._responses = response_judge(
            settings.method,
            token_text(self._tokenizer, self._vocabulary),
            build_verifier(rl_config, settings.grader, settings.grading),
        )
        self._training_responses = (
            replace(self._responses, grader=EvaluatedOnly(self._responses.grader))
            if settings.require_evaluated
            else self._responses
        )
        self._train_records = RecordLookup(
            megatron_config.data_path,
            self._tokenizer,
            megatron_config.dataset_additional_keys,
            settings.data_sha256,
        )
        self._lookup = self._train_records

    def init_transfer_dock(self, td: Any, *_others: Any) -> None:
        """Remember the dock."""
        self._dock = td

    def compute_rm_score(self) -> None:
        """Judge this node's rows of the iteration and write their reward columns.

        Raises:
            GradingError: the worker could not be initialised; the cause is chained.
        """
        self._check_initialised()
        settings, rl_config = self._settings, self._rl_config
        group = rl_config.n_samples_per_prompt
        count = rl_config.reward_dispatch_size
        for rows in batches(
            self._dock,
            "rule_reward",
            self._columns,
            count,
            assigned=self._assigned_rows(count) if rl_config.guarantee_order else None,
            stall_timeout=settings.stall_timeout,
        ):
            start = time.time()
            check_groups(rows.indexes, group)
            judged = self._judge(rows, self._training_responses)
            end = time.time()  # as in MindSpeed-RL: its timing ends with the scores
            put(
                self._dock,
                {
                    "rm_scores": judged.correct.float().unsqueeze(1),
                    columns.CONFIDENCE: judged.confidence.float().unsqueeze(1),
                    columns.CONFIDENCE_LENGTH: judged.confidence_lengths.unsqueeze(1),
                    columns.GRADABLE: judged.gradable.long().unsqueeze(1),
                },
                rows.indexes,
            )
            self._report(judged, start, end)

    def judge_rows(self, columns_: dict[str, list[Tensor]], indexes: list[int], eval_data: str) -> dict[str, Any]:
        """Judge rows that are not the dock's to hand out: those of a validation.

        Args:
            columns_: ``responses``, ``response_length`` and the data set's columns.
            indexes: of the rows.
            eval_data: the file of held-out records that the rows' record indexes refer to.

        Returns:
            ``correct``, ``gradable``, ``confidence``, ``confidence_lengths`` and ``texts``.

        Raises:
            GradingError: as :meth:`compute_rm_score`.
        """
        self._check_initialised()
        self._lookup = RecordLookup(eval_data, self._tokenizer, [columns.RECORD], self._settings.data_sha256)
        try:
            judged = self._judge(Rows(columns_, indexes), self._responses)
        finally:
            self._lookup = self._train_records
        return {
            "correct": judged.correct,
            "gradable": judged.gradable,
            "confidence": judged.confidence,
            "confidence_lengths": judged.confidence_lengths,
            "texts": judged.texts,
        }

    def _check_initialised(self) -> None:
        if self._failure is not None:
            raise GradingError(f"the reward worker could not be initialised: {self._failure}") from self._failure

    def _judge(self, rows: Rows, responses: ResponseJudge) -> JudgedResponses:
        return responses(
            rows.padded("responses").to(torch.int64),
            rows.scalars("response_length").to(torch.int64),
            self._lookup(rows),
        )

    def _assigned_rows(self, count: int) -> list[list[int]]:
        from mindspeed_rl.utils.utils import get_current_dp_range_indexes, get_node_nums

        share = self._global_batch_size * self._rl_config.n_samples_per_prompt // get_node_nums()
        rows: list[list[int]] = get_current_dp_range_indexes(count, share, self._node)
        return rows

    def _report(self, judged: JudgedResponses, start: float, end: float) -> None:
        report(
            self._dock,
            {
                "timing/rule_reward": [round(end, 4), round(start, 4)],
                "start_time/rule_reward": [round(start, 4)],
                "end_time/rule_reward": [round(end, 4)],
                "seconds/grading": [judged.grading_seconds],
            },
        )


def reward_actor(_original: Any) -> Any:
    """For the manifest: the class as a Ray actor."""
    import ray

    return ray.remote(RewardWorker)
