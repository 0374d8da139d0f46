"""The reward stage: scores every response in the dock.

It replaces MindSpeed-RL's ``RuleReward``: one actor per node, with the same methods.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.data.prompts import form_digest, form_of
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.stages.dock import Rows, batches, check_groups, put, report, score_columns
from coca_mindspeed.mindspeed.stages.metrics import ratio
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.upstream_keys import OWN_VERIFIER
from coca_mindspeed.scoring.metrics import cut_off
from coca_mindspeed.scoring.responses import held_out_predictions, training_scorer
from coca_mindspeed.scoring.rollout import Graded, Sampled
from coca_mindspeed.utils.tokenization import token_text


class RewardWorker:
    """The Ray actor; MindSpeed-RL's trainer calls its methods."""

    _failure: BaseException | None = None

    def initialize(
        self, megatron_config: Any, rl_config: Any, tokenizer: Any, trust_remote_code: bool = False, dp_rank: int = 0
    ) -> None:
        """Build the grader and the tokenizer's byte table; MindSpeed-RL gives its configurations and tokenizer wrapper.

        MindSpeed-RL ignores a failure here, so it is kept and raised by the first use.  ``dp_rank`` is this actor's
        share of the rows, where order is guaranteed; ``trust_remote_code`` is not used.
        """
        try:
            self._settings = settings = process_settings().coca
            self._longest, self._eos = process_settings().max_new_tokens, tokenizer.tokenizer.eos_token_id
            self._rl_config, self._node, self._global_batch_size = rl_config, dp_rank, megatron_config.global_batch_size
            self._training_file = str(megatron_config.data_path)
            self._columns = ["responses", "response_length", *megatron_config.dataset_additional_keys]
            text = token_text(tokenizer.tokenizer, int(megatron_config.padded_vocab_size or 0))
            grader = build_verifier(rl_config, settings.grader, settings.grading)
            self._scorer = training_scorer(settings, text, grader)
        except BaseException as failure:
            self._failure = failure
            raise

    def take_records(self, files: Mapping[str, Sequence[Record]]) -> None:
        """Set the records of the run's files, by path."""
        self._check_initialised()
        self._files = files
        self._form = form_of(files[self._training_file], self._settings.method, self._settings.chat_template_kwargs)

    def init_transfer_dock(self, td: Any, *_others: Any) -> None:
        """Set the dock."""
        self._dock = td

    def compute_rm_score(self) -> None:
        """Score this node's rows of the iteration and write their reward columns."""
        self._check_initialised()
        rl_config, count = self._rl_config, self._rl_config.reward_dispatch_size
        for rows in batches(
            self._dock,
            "rule_reward",
            self._columns,
            count,
            assigned=self._assigned_rows(count) if rl_config.guarantee_order else None,
            stall_timeout=self._settings.stall_timeout,
        ):
            start = time.time()
            check_groups(rows.indexes, rl_config.n_samples_per_prompt)
            graded = self._scorer.for_training(self._score(rows, self._files[self._training_file]))
            end = time.time()  # MindSpeed-RL's timing also ends before the scores are written
            put(
                self._dock,
                {"rm_scores": graded.correct[:, None].float().nan_to_num(0.0), **score_columns(graded)},
                rows.indexes,
            )
            report(
                self._dock,
                {
                    "timing/rule_reward": [round(end, 4), round(start, 4)],
                    "start_time/rule_reward": [round(start, 4)],
                    "end_time/rule_reward": [round(end, 4)],
                    "seconds/grading": [graded.grading_seconds],
                    **{name: [value] for name, value in self._cut_off(rows).items()},
                },
            )

    def score_rows(self, dock_columns: dict[str, list[Tensor]], indexes: list[int], eval_data: str) -> list[Prediction]:
        """Score the rows of a validation, group by group, on the held-out records in ``eval_data``.

        ``dock_columns`` are ``responses``, ``response_length`` and the data set's columns.
        """
        self._check_initialised()
        graded = self._score(Rows(dock_columns, indexes), self._files[eval_data])
        samples = self._rl_config.n_samples_per_prompt
        answers = held_out_predictions(graded, self._settings.method.label)
        system_prompt = self._settings.method.system_prompt
        forms = [form_digest(record, system_prompt, self._form) for record in graded.records]
        return [
            replace(answer, sample=row % samples, form=form)
            for row, (answer, form) in enumerate(zip(answers, forms, strict=True))
        ]

    def _check_initialised(self) -> None:
        if self._failure is not None:
            raise GradingError(f"the reward worker could not be initialised: {self._failure}") from self._failure

    def _score(self, rows: Rows, records: Sequence[Record]) -> Graded:
        token_ids = rows.padded("responses").to(torch.int64)
        sampled = Sampled(token_ids=token_ids, lengths=rows.scalars("response_length").to(torch.int64))
        return self._scorer(sampled, [records[index] for index in rows.scalars(RECORD).tolist()])

    def _cut_off(self, rows: Rows) -> dict[str, float]:
        """The share of cut off responses; nothing if the longest response is unknown."""
        if self._longest is None:
            return {}
        lengths = rows.scalars("response_length").to(torch.int64)
        number = int(cut_off(rows.padded("responses").to(torch.int64), lengths, self._longest, [self._eos]).sum())
        return ratio("response/cut_off_share", number, len(lengths))

    def _assigned_rows(self, count: int) -> list[list[int]]:
        from mindspeed_rl.utils.utils import get_current_dp_range_indexes, get_node_nums

        share = self._global_batch_size * self._rl_config.n_samples_per_prompt // get_node_nums()
        rows: list[list[int]] = get_current_dp_range_indexes(count, share, self._node)
        return rows


class MindSpeedVerifier:
    """MindSpeed-RL's verifiers as a grader: a weighted score of 1 is right, 0 or a penalty is wrong.

    ``acc`` subtracts 0.5 for a wrong answer and 1 for one without a box, ``acc_for_dapo`` 1 for either.
    """

    def __init__(self, rl_config: Any) -> None:
        self._config = rl_config

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        from mindspeed_rl.models import rule_verifier

        labels = {"labels": [record.answer for record in records]}
        scores: list[float] = rule_verifier.verifier(list(answers), labels, self._config)[0]
        for score in scores:
            if not (score == 1 or score <= 0):
                raise GradingError(
                    f"rl_config.verifier_function {list(self._config.verifier_function)} scored an answer {score}; "
                    "expected 1 for right, 0 or less for wrong: the confidence is trained towards a success rate"
                )
        return [Verdict(Outcome.RIGHT if score == 1 else Outcome.WRONG) for score in scores]

    def close(self) -> None:
        """Nothing to release."""


def build_verifier(rl_config: Any, grader: str, options: Mapping[str, Any]) -> Grader:
    """Build the grader that ``rl_config.verifier_function`` names; ``grader`` and ``options`` are for ``coca``."""
    own = OWN_VERIFIER in rl_config.verifier_function
    return build_grader(grader, options) if own else MindSpeedVerifier(rl_config)


def reward_actor(_original: Any) -> Any:
    """Replace ``RuleReward`` by our actor."""
    import ray

    return ray.remote(RewardWorker)
