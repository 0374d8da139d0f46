"""verl's synchronous trainer with this project's advantages, validation and dumps: ``trainer.v1.trainer_mode=coca``.

The loop is verl's own.  Overridden are the places where whole groups are at hand and verl would give every token of a
response one advantage, where validation becomes numbers, and where rollouts are dumped.
"""

import copy
import sys
import time
from pathlib import Path
from typing import Any

import ray
import transfer_queue
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from coca_mindspeed.config.checks import refuse
from coca_mindspeed.data.chat_template import write_into_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import write_predictions
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.scoring.metrics import HealthWarnings
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.files import write_json_lines
from coca_mindspeed.verl.advantage_step import AdvantageStep, StepShape, check_broken, judged_validation
from coca_mindspeed.verl.checks import check_length, check_same_run, verl_problems
from coca_mindspeed.verl.earlier_rows import EarlierRows, file_of_verls_log
from coca_mindspeed.verl.estimator import handing_over
from coca_mindspeed.verl.records import check_prompts, check_rows
from coca_mindspeed.verl.release import known_release
from coca_mindspeed.verl.segment_loss import CONFIDENCE_SEGMENT_TOKENS, SegmentLoss, divide_segment_sums
from coca_mindspeed.verl.settings import NAME, verl_settings

# Handing a column over takes time row by row: what was judged, one object a row, and what a critic would learn.
_UNREAD_BY_THE_ACTOR = frozenset(("extra_fields", "returns"))


@register_trainer(NAME)
class SegmentTrainer(PPOTrainerSync):
    """The trainer; its methods are verl's, by verl's names."""

    def __init__(self, config: Any) -> None:
        """Refuse what cannot be trained by the method, before anything is loaded.

        Args:
            config: verl's, whole.

        Raises:
            ConfigError: naming every key at fault.
            ManifestError: this verl is none that we know.
        """
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self._settings = verl_settings(plain)
        refuse(verl_problems(plain, self._settings), "verl would not train by the method:")
        known_release()
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl asks for this very word where a trainer is synchronous
        super().__init__(config)
        self._last_step: AdvantageStep | None = None
        self._earlier: EarlierRows | None = None
        self._health = HealthWarnings()

    def _init_dataloader(self) -> None:
        """Load the questions, and look at every one of them before the model is loaded."""
        super()._init_dataloader()
        data = self.config.data
        sets = {"data.train_files": self.train_dataset, "data.val_files": self.val_dataset}
        system_prompt = self._settings.method.training_method.system_prompt
        tokenizer = copy.deepcopy(self.tokenizer)  # verl's own is given the variables with each chat
        section: Any = OmegaConf.to_container(data, resolve=True)
        write_into_template(tokenizer, section.get("apply_chat_template_kwargs") or {})
        path = self.config.actor_rollout_ref.model.path
        grader = build_grader(self._settings.grader, self._settings.grading)
        try:
            records: dict[Path | str, list[Record]] = {}
            for what, rows in sets.items():
                records[what] = check_rows(rows.dataframe, what, system_prompt, tokenizer, data.max_prompt_length)
                check_prompts(records[what], system_prompt, tokenizer, path, self._settings)
            check_records(grader, records)
        finally:
            grader.close()
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"data.train_batch_size: {data.train_batch_size} questions a step, and data.train_files has "
                f"{len(self.train_dataset)}"
            )
        if not self.config.trainer.get("val_only", False):
            check_length(self.total_training_steps, self.steps_per_epoch, self.config.trainer.total_epochs)

    def _load_checkpoint(self) -> None:
        """Resume only what is the same run: whose method, and whose length where stages share it, is the same."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        check_same_run(Path(trainer.default_local_dir), self._settings, self.total_training_steps, self.global_steps)
        if "file" in trainer.logger:
            log = file_of_verls_log(trainer.project_name, trainer.experiment_name)
            self._earlier = EarlierRows(log, self.global_steps)

    def on_init_end(self) -> None:
        """Wait for the reward workers, which verl never asks whether they could be built, and set our loss function."""
        ray.get([worker.__ray_ready__.remote() for worker in self.get_reward_handles()])
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(SegmentLoss(actor, self._settings.method.clip))
        super().on_init_end()

    def on_validate_begin(self) -> None:
        """The first call in a run that validates before it trains; verl's loggers are open by then."""
        super().on_validate_begin()
        self._log_earlier_rows()

    def on_train_begin(self) -> None:
        """The first call in one that does not."""
        super().on_train_begin()
        self._log_earlier_rows()

    def _log_earlier_rows(self) -> None:
        if self._earlier is not None:
            self._earlier.log_again(lambda data, step: self.logger.log(data=data, step=step, backend=["file"]))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Advantages of whole groups, on the tokens of their segments; written to the queue by verl itself."""
        start = time.perf_counter()
        columns = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "extra_fields"]
        )
        step = AdvantageStep.of_batch(
            keys=batch.keys,
            tags=batch.tags,
            rows=list(map(_reward_extra_info, columns["extra_fields"])),
            response_lengths=columns["response_mask"].offsets().diff().cpu(),
            shape=StepShape(self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n),
            settings=self._settings,
            stage=self._settings.stage(self.global_steps, self.total_training_steps),
        )
        transfer_queue.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({CONFIDENCE_SEGMENT_TOKENS: step.segment_lengths[:, None]}, batch_size=len(batch.keys)),
        )
        found = step.metrics()
        metrics.update(found)
        if warning := self._health.after_step(self.global_steps, found):
            print_text(warning, sys.stderr)
        metrics["seconds/advantage"] = time.perf_counter() - start
        self._last_step = step
        with handing_over(step.advantages):
            return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Update, without the columns that no loss reads, and divide the sums that ours has counted by segment."""
        columns = batch.fields
        batch.fields = [name for name in columns if name not in _UNREAD_BY_THE_ACTOR]
        try:
            updated = super()._update_actor(batch, metrics)
        finally:
            batch.fields = columns
        metrics.update(divide_segment_sums(metrics))
        return updated

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Any,
        sample_turns: Any,
        expected_acc_counts: Any = None,
    ) -> dict[str, float]:
        """Acc, AUROC, ECE, Brier, SR and TTC beside verl's own accuracy; predictions where verl dumps generations."""
        found = judged_validation(reward_extra_infos_dict)
        asked = sum((expected_acc_counts or {}).values()) or len(found.rows)
        check_broken(asked - len(found.rows), self._settings.broken_groups, asked, "held-out questions")
        folder = self.config.trainer.get("validation_data_dir", None)
        if folder:
            path = Path(folder) / f"predictions_step_{self.global_steps:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_predictions(path, [row.prediction for row in found.rows])
        own = {name: reward_extra_infos_dict[name] for name in ("reward", "acc")}
        metrics = super()._val_metrics_update(data_sources, sample_uids, own, sample_turns, expected_acc_counts)
        return {**metrics, **found.metrics(), "eval/missing": float(asked - len(found.rows))}

    def _log_rollout_data(self, batch: Any, timing_raw: dict[str, Any], rollout_data_dir: str) -> None:
        """Dump the step's responses with what they stated, earned and learned, in the place of verl's own dump."""
        if not self._settings.dumps(self.global_steps):
            return
        assert self._last_step is not None
        path = Path(rollout_data_dir) / f"step_{self.global_steps:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(path, self._last_step.dump(self.global_steps, self._settings.samples_prompts))


def _reward_extra_info(extra_fields: Any) -> Any:
    value = getattr(extra_fields, "data", extra_fields)  # verl's queue may wrap what is no tensor
    return value.get("reward_extra_info", {}) if isinstance(value, dict) else {}
