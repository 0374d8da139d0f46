"""Validation between iterations: held-out questions through the rollout and the graders of the training."""

from typing import Any

import torch

from coca_mindspeed.evaluation.predictions import VALIDATIONS, Prediction, validation_file, write_predictions
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.stages.dock import (
    ROLLOUT_LOG_PROBS,
    fetch,
    read_rows,
    report,
)
from coca_mindspeed.mindspeed.stages.metrics import append_line
from coca_mindspeed.mindspeed.start.process import VALIDATION, CocaSettings
from coca_mindspeed.mindspeed.start.records import load_prompts
from coca_mindspeed.scoring.metrics import values
from coca_mindspeed.scoring.responses import held_out_gap, held_out_metrics
from coca_mindspeed.utils.json_files import read_steps


class Validation:
    """Runs validations for one trainer."""

    def __init__(self, settings: CocaSettings, trainer: Any) -> None:
        assert settings.eval_data is not None
        assert settings.output_dir is not None
        self._settings, self._trainer = settings, trainer
        self._file, self._log = settings.eval_data, settings.output_dir / VALIDATION
        rl_config = trainer.actor_worker.rl_config
        self._prompts = load_prompts(self._file, trainer.tokenizer.tokenizer, settings, rl_config.max_prompt_length)
        self._graders = [reward for reward in trainer.reward_list if hasattr(reward, "score_rows")]

    def is_done(self, iteration: int) -> bool:
        """Whether the log has the validation after an iteration."""
        return self._log.exists() and any(row["step"] == iteration for row in read_steps(self._log))

    def run(self, iteration: int) -> dict[str, float]:
        """Evaluate the current weights; write predictions, log Acc, AUROC, ECE, Brier, SR and TTC under ``eval/``."""
        trainer = self._trainer
        questions, size = list(range(len(self._prompts))), trainer.global_batch_size
        chunks = (questions[first : first + size] for first in range(0, len(questions), size))
        answers = [answer for chunk in chunks for answer in self._roll_out(chunk)]
        gap = values(held_out_gap(answers))
        named = {f"eval/{name}": value for name, value in held_out_metrics(answers).items()} | gap
        # Before the log, by which a validation is done.
        write_predictions(validation_file(self._log.parent / VALIDATIONS, iteration), answers)
        append_line(self._log, {"step": iteration, **named})
        if trainer.tensorboard is not None:
            for name, value in named.items():
                trainer.tensorboard.add_scalar(name, value, iteration)
        for logger in (trainer.wandb, getattr(trainer, "swanlab", None)):
            if logger is not None:
                logger.log_metrics(named, iteration)
        # Of the following iteration, for the health warnings.
        report(trainer.transfer_dock, {name: [value] for name, value in gap.items()})
        print(f"validation at iteration {iteration}: {named}", flush=True)
        return named

    def _roll_out(self, questions: list[int]) -> list[Prediction]:
        from mindspeed_rl.trainer.utils.transfer_dock import put_prompts_experience

        trainer = self._trainer
        dock, samples = trainer.transfer_dock, trainer.n_samples_per_prompt
        # The dock takes whole iterations: fill up with the last question, and drop the repetitions afterwards.
        full = questions + [questions[-1]] * (trainer.global_batch_size - len(questions))
        batch = {
            "prompts": [torch.from_numpy(self._prompts[index]).long() for index in full],
            RECORD: [torch.tensor([index]) for index in full],
        }
        rows, indexes = put_prompts_experience(batch, samples, [RECORD])
        fetch(dock.put_experience.remote(data_dict=rows, indexes=indexes, is_prompt=True))
        trainer.actor_worker.generate_sequences(blocking=True)
        trainer.actor_worker.wait_all_ref_objs_run_over()
        # Wait for every column of every row: a column written after the dock is cleared would enter the next iteration.
        scored_by = ["responses", "response_length", RECORD]
        others = ["input_ids", *([ROLLOUT_LOG_PROBS] if self._settings.rollout_log_probs else [])]
        everything = read_rows(
            dock, [*scored_by, *others], list(range(len(full) * samples)), stall_timeout=self._settings.stall_timeout
        )
        wanted = list(range(len(questions) * samples))
        responses = {name: everything[name][: len(wanted)] for name in scored_by}
        scored: list[Prediction] = fetch(self._graders[0].score_rows.remote(responses, wanted, str(self._file)))
        fetch(dock.clear.remote())
        return scored
