"""verl's three V1 trainers with segment advantages, validation and dumps: ``trainer.v1.trainer_mode``.

``coca`` is verl's ``sync``, ``coca_colocate_async`` its ``colocate_async``, ``coca_separate_async`` its
``separate_async``.  The loops are verl's own.  How a run differs from the paper (arXiv 2603.05881), apart from the
options of docs/method.md:

1. Invalid responses have a format advantage of their own (``coca.method.separate_format``; false: the paper's form).
2. Ungradable answers take no part in GESR and advantages; a group with fewer than two gradable answers trains nothing.
3. In training, an answer that only restates the question earns nothing (``coca.require_evaluated``; false: the paper's
   form).
4. The ratio is taken to log-probabilities that the trainer computes before the update.  Token weights that correct for
   the rollout engine may be added (``algorithm.rollout_correction.rollout_is=token``; null: the paper's form).
5. A group that lacks a response because a rollout failed trains nothing (``coca.broken_groups`` allows some).
6. The stages of a method share the steps and the optimizer of one run.
7. In an asynchronous trainer, earlier weights sampled the responses, in part or wholly, and the success rate is theirs.
   Groups that are too old are discarded (``group/discarded``).
"""

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import transfer_queue
import verl
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_to_nested

from coca_mindspeed.config.plan import QuestionCounts
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.data.prompts import form_digest, form_of, write_into_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError, raise_problems
from coca_mindspeed.evaluation.predictions import validation_file, write_predictions
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.scoring.metrics import LOG_PROB_GAP, TIMES_ASKED
from coca_mindspeed.scoring.probe import check_custom_grader
from coca_mindspeed.scoring.responses import check_custom_method
from coca_mindspeed.scoring.settings import dump_is_due
from coca_mindspeed.upstream.manifest import matching_manifest
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.json_files import write_json_lines
from coca_mindspeed.utils.saving import CheckpointTimer, StopRequest
from coca_mindspeed.verl.batch import (
    ScoredStep,
    check_broken,
    score_step,
    step_metrics,
    validation_metrics,
    validation_predictions,
)
from coca_mindspeed.verl.checkpoints import MetricsBeforeResume, check_length, check_resume, file_of_verls_log
from coca_mindspeed.verl.checks import check_prompts, check_rows, verl_problems
from coca_mindspeed.verl.requirements import TRAIN_FILES, VAL_FILES, VerlRun
from coca_mindspeed.verl.segment_loss import ROLLOUT_WEIGHTS, SEGMENT_ENDS, SegmentLoss, divide_segment_sums
from coca_mindspeed.verl.settings import NAME, TRAINERS, verl_settings
from coca_mindspeed.verl.upstream_keys import refused_sections

# Passing a column on takes time row by row: the reports of the reward manager, and the targets of a critic.
_UNREAD_BY_THE_ACTOR = frozenset(("extra_fields", "returns"))
# verl's counts of groups that an asynchronous trainer removes before a step: too old, or with a failed rollout.
_STALE, _FAILED = (f"training/{why}/evicted_samples" for why in ("off_policy", "rollout_failure"))


def refuse_other_trainers(**_arguments: Any) -> Any:
    """The advantage estimator ``coca``: called only by a trainer other than ours, which writes the advantages itself.

    An estimator of verl's is given neither the responses nor the reward manager's reports.
    """
    raise TrainingError(f"algorithm.adv_estimator={NAME} needs trainer.v1.trainer_mode={' or '.join(TRAINERS)}")


register_adv_est(NAME)(refuse_other_trainers)


class SegmentTrainer(PPOTrainer):
    """The part that the trainers share; its methods override those of verl's trainer, the next base class.

    ``scored``: the mini-batches of this step.
    """

    total_training_steps: int  # verl's

    def __init__(self, config: Any) -> None:
        """Check the configuration and verl's release before anything is loaded."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self._settings = verl_settings(plain)
        problems = verl_problems(plain, self._settings) or list(refused_sections(plain))
        raise_problems(problems, "verl would not train by the method:")
        check_custom_method(self._settings.method)
        engine: Any = "megatron" if plain["actor_rollout_ref"]["actor"]["strategy"] == "megatron" else "fsdp"
        matching_manifest(Path(str(verl.__file__)).parents[1], package="verl", engine=engine)
        with open_dict(config):
            config.trainer.v1.trainer_mode = TRAINERS[config.trainer.v1.trainer_mode]  # verl compares with its words
            # With the paths of the user's own code: workers may have another working directory.
            OmegaConf.update(config, f"{NAME}.method", asdict(self._settings.method), merge=False)
            OmegaConf.update(config, f"{NAME}.grader", self._settings.grader)
        super().__init__(config)
        self.scored: list[ScoredStep] = []
        self._earlier: MetricsBeforeResume | None = None
        self._health = HealthWarnings()
        self._stop = StopRequest.of(Path(config.trainer.default_local_dir).parent)
        self._timer = CheckpointTimer(self._settings.checkpoint_minutes)

    def _init_dataloader(self) -> None:
        """Load the questions and check all of them before the model is loaded."""
        super()._init_dataloader()
        data = self.config.data
        sets = {TRAIN_FILES: self.train_dataset, VAL_FILES: self.val_dataset}
        system_prompt = self._settings.method.system_prompt
        tokenizer = copy.deepcopy(self.tokenizer)  # verl passes the variables to its own with each chat
        section: Any = OmegaConf.to_container(data, resolve=True)
        variables = section.get("apply_chat_template_kwargs") or {}
        write_into_template(tokenizer, variables)
        path = self.config.actor_rollout_ref.model.path
        grader = build_grader(self._settings.grader, self._settings.grading)
        try:
            records: dict[str, list[Record]] = {}
            for what, rows in sets.items():
                records[what] = check_rows(rows.dataframe, what, system_prompt, tokenizer, data.max_prompt_length)
                check_prompts(records[what], system_prompt, tokenizer, path, self._settings)
            grader.check([record for each in records.values() for record in each])
            check_custom_grader(grader, self._settings.grader, records[TRAIN_FILES], self._settings.method)
            plain: Any = OmegaConf.to_container(self.config, resolve=True)
            evaluated = records[VAL_FILES] if VerlRun(plain, self._settings).evaluates else ()
            train, held_out = ([record.question for record in each] for each in (records[TRAIN_FILES], evaluated))
            counts = QuestionCounts.of(train, held_out, self.total_training_steps * data.train_batch_size)
            self._questions = counts.train
            form = form_of(records[TRAIN_FILES], self._settings.method, variables)
            self._prompt = TrainedPrompt.of_training(form, self._settings.method, data.max_response_length)
            self._forms = {(r.dataset, r.id): form_digest(r, system_prompt, form) for r in records[VAL_FILES]}
            for warning in counts.warnings(TRAIN_FILES, section["train_files"], VAL_FILES, section["val_files"]):
                print_note(f"warning: {warning}")
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
        """Resume only with the same method and grading and, for a method with stages, the same length."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        directory = Path(trainer.default_local_dir)
        plain: Any = OmegaConf.to_container(self.config, resolve=True)
        files = VerlRun(plain, self._settings).files(TRAIN_FILES)
        steps = self.total_training_steps, self.global_steps
        check_resume(directory, self._settings, *steps, train_files=files, prompt=self._prompt)
        if "file" in trainer.logger:
            log = file_of_verls_log(trainer.project_name, trainer.experiment_name)
            self._earlier = MetricsBeforeResume(log, self.global_steps)

    def on_init_end(self) -> None:
        """Set our loss, after waiting for the reward workers: verl does not check that they could be built."""
        ray.get([worker.__ray_ready__.remote() for worker in self.get_reward_handles()])
        self.actor_rollout_wg.set_loss_fn(SegmentLoss(self._settings.method))
        super().on_init_end()

    def on_validate_begin(self) -> None:
        """First call after verl has opened its loggers, if the run validates before it trains."""
        super().on_validate_begin()
        self._log_earlier_rows()

    def on_train_begin(self) -> None:
        """First call after verl has opened its loggers, if it does not."""
        super().on_train_begin()
        self._log_earlier_rows()

    def _log_earlier_rows(self) -> None:
        if self._earlier is not None:
            self._earlier.replay(lambda data, step: self.logger.log(data=data, step=step, backend=["file"]))

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._timer.saved(self.global_steps)

    def on_step_end(self) -> None:
        """Save if that is due by the clock; if the run is asked to stop, save and let verl's loop end with this step.

        verl has saved by its interval before, and validates and logs the step afterwards.
        """
        step, last = self.global_steps, self.global_steps >= self.total_training_steps
        asked = self._stop.is_asked() and not last
        if self._timer.is_due(step) or (asked and step > self._timer.step):
            self._save_checkpoint()
        super().on_step_end()
        if asked:
            self._stop.answer(step)
            self.total_training_steps = step

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Run verl's step, of one or more mini-batches, and measure all of it."""
        self.scored = []
        batch = super().step(metrics, timing_raw)
        repeated = self.global_steps > self.steps_per_epoch
        metrics.update(step_metrics(self.scored, repeated=repeated))
        metrics.update(divide_segment_sums(metrics))
        metrics[TIMES_ASKED] = max(1.0, self.global_steps * self.config.data.train_batch_size / self._questions)
        metrics["seconds/advantage"] = timing_raw["adv"]
        metrics["group/broken"] += float(metrics.get(_FAILED, 0))
        total = self.config.data.train_batch_size
        check_broken(int(metrics["group/broken"]), self._settings.broken_groups, total, "groups")
        if self.trainer_mode != "sync":
            metrics["group/discarded"] = float(metrics.get(_STALE, 0))
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *others: Any, **named: Any) -> None:
        """Warn where the step, with its validation, shows that the run learns less than it should."""
        super()._compute_metrics(batch, metrics, *others, **named)
        if warning := self._health.after_step(self.global_steps, metrics, self._settings.method.training_method):
            print_note(warning)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Write the advantages of whole groups to the queue, and verl's rollout correction if it has what it needs."""
        log_probs = ("old_log_probs", "rollout_log_probs")
        data = transfer_queue.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["response_mask", "extra_fields", *log_probs],
        )
        mask, settings = data["response_mask"], self._settings
        old_log_probs = None
        if settings.method.reads_log_probs:
            old_log_probs = data["old_log_probs"].to_padded_tensor(0.0).cpu()
        step = score_step(
            keys=batch.keys,
            tags=batch.tags,
            rows=list(map(_reward_extra_info, data["extra_fields"])),
            response_lengths=mask.offsets().diff().cpu(),
            old_log_probs=old_log_probs,
            prompts=self.config.data.train_batch_size // self.parameter_sync_step,
            group=self.config.actor_rollout_ref.rollout.n,
            settings=settings,
            stage=settings.stage(self.global_steps, self.total_training_steps),
            longest=self.config.data.max_response_length,
        )
        columns = step.columns()
        advantages = response_to_nested(columns["advantages"], mask)
        fields = {
            "advantages": advantages,
            "returns": advantages,  # there is no critic
            SEGMENT_ENDS: columns["segment_ends"],
        }
        correction = self.config.algorithm.get("rollout_correction", None)
        both = all(name in data.keys() for name in log_probs)  # noqa: SIM118  a TensorDict
        if both and self.trainer_mode == "sync":  # of earlier weights elsewhere
            old, sampled = (data[name].values() for name in log_probs)
            metrics[LOG_PROB_GAP] = float((old - sampled).abs()[mask.values().bool()].mean())
        if correction is not None and both:
            padded = DataProto(batch=data.select("response_mask", *log_probs).to_padded_tensor())
            corrected, found = compute_rollout_correction_and_add_to_batch(padded, correction)
            metrics.update(found)
            for name in ("response_mask", ROLLOUT_WEIGHTS):
                if name in corrected.batch.keys():  # noqa: SIM118
                    fields[name] = response_to_nested(corrected.batch[name], mask)
        batch = transfer_queue.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch.keys))
        )
        self.scored.append(step)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Update without the columns that no loss reads."""
        columns = batch.fields
        batch.fields = [name for name in columns if name not in _UNREAD_BY_THE_ACTOR]
        try:
            return super()._update_actor(batch, metrics)
        finally:
            batch.fields = columns

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Any,
        sample_turns: Any,
        **others: Any,
    ) -> dict[str, float]:
        """Add Acc, AUROC, ECE, Brier, SR and TTC, and write predictions where verl dumps generations."""
        predictions = [
            replace(prediction, form=self._forms.get((prediction.dataset, prediction.id)))
            for prediction in validation_predictions(reward_extra_infos_dict)
        ]
        asked = sum((others.get("expected_acc_counts") or {}).values()) or len(predictions)  # since 0.9.1
        missing = asked - len(predictions)
        check_broken(missing, self._settings.broken_groups, asked, "held-out questions")
        folder = self.config.trainer.get("validation_data_dir", None)
        if folder:
            write_predictions(validation_file(Path(folder), self.global_steps), predictions)
        own = {name: reward_extra_infos_dict[name] for name in ("reward", "acc")}
        metrics = super()._val_metrics_update(data_sources, sample_uids, own, sample_turns, **others)
        held_out = validation_metrics(predictions)
        callback = getattr(self, "checkpoint_callback", None)  # since 0.9.1
        if (on_validate := getattr(callback, "on_validate", None)) is not None:  # of our BestCheckpoint
            on_validate(self.global_steps, held_out)
        return {**metrics, **held_out, "eval/missing": float(missing)}

    def _log_rollout_data(self, batch: Any, timing_raw: dict[str, Any], rollout_data_dir: str) -> None:
        """Dump responses with confidence, rewards and advantages in place of verl's own dump."""
        if not dump_is_due(self._settings.samples_interval, self.global_steps):
            return
        count = self._settings.samples_prompts
        path = Path(rollout_data_dir) / f"step_{self.global_steps:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for step in self.scored for row in step.dump(self.global_steps, count)]
        write_json_lines(path, rows[: count * self.config.actor_rollout_ref.rollout.n])


@register_trainer(NAME)
class SyncSegmentTrainer(SegmentTrainer, PPOTrainerSync):
    """Sampling and training take turns."""


@register_trainer(f"{NAME}_colocate_async")
class ColocateAsyncSegmentTrainer(SegmentTrainer, PPOTrainerColocateAsync):
    """Training interrupts sampling, which goes on with the new weights."""


@register_trainer(f"{NAME}_separate_async")
class SeparateAsyncSegmentTrainer(SegmentTrainer, PPOTrainerSeparateAsync):
    """Devices of their own sample while the others train; each step samples and trains several mini-batches."""


def _reward_extra_info(extra_fields: Any) -> Any:
    value = getattr(extra_fields, "data", extra_fields)  # the queue may wrap objects
    return value.get("reward_extra_info", {}) if isinstance(value, dict) else {}
