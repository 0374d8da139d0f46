"""Validation while training: the current weights answer held-out questions through the training's own machinery.

Between two iterations the dock is empty.  Held-out prompts are put into it, the actors roll them out, a reward worker
judges the responses, and the dock is cleared again; nothing is learned from them.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.dataset import load_prompts
from coca_mindspeed.mindspeed.stages.dock import fetch, read_rows, report
from coca_mindspeed.mindspeed.stages.metrics import append_line
from coca_mindspeed.mindspeed.start.settings import VALIDATION, CocaSettings
from coca_mindspeed.scoring.responses import held_out_metrics
from coca_mindspeed.utils.jsonl import read_steps


class Validation:
    """Runs validations for one trainer."""

    def __init__(self, settings: CocaSettings, trainer: Any) -> None:
        assert settings.eval_data is not None
        assert settings.output_dir is not None
        self._settings, self._trainer = settings, trainer
        self._file, self._log = settings.eval_data, settings.output_dir / VALIDATION
        rl_config = trainer.actor_worker.rl_config
        _, self._prompts = load_prompts(self._file, trainer.tokenizer.tokenizer, settings, rl_config.max_prompt_length)
        self._graders = [reward for reward in trainer.reward_list if hasattr(reward, "judge_rows")]

    def is_done(self, iteration: int) -> bool:
        """Whether the log has the validation after an iteration."""
        return self._log.exists() and any(row["step"] == iteration for row in read_steps(self._log))

    def run(self, iteration: int) -> dict[str, float]:
        """Judge the current weights; log Acc, AUROC, ECE, Brier, SR and TTC under ``eval/``, as locally."""
        trainer, start = self._trainer, time.perf_counter()
        judged = [self._roll_out(prompts) for prompts in self._chunks()]
        joined = {name: torch.cat([part[name] for part in judged]) for name in judged[0]}
        names = ("correct", "gradable", "confidence", "confidence_lengths")
        metrics = held_out_metrics(*(joined[name] for name in names))
        named = {f"eval/{name}": value for name, value in metrics.items()}
        append_line(self._log, {"step": iteration, **named})
        if trainer.tensorboard is not None:
            for name, value in named.items():
                trainer.tensorboard.add_scalar(name, value, iteration)
        for logger in (trainer.wandb, getattr(trainer, "swanlab", None)):
            if logger is not None:
                logger.log_metrics(named, iteration)
        # MindSpeed-RL's timing/all of the iteration that follows includes it.
        report(trainer.transfer_dock, {"seconds/evaluation": [time.perf_counter() - start]})
        print(f"validation at iteration {iteration}: {named}", flush=True)
        return named

    def _chunks(self) -> Iterator[list[int]]:
        size = self._trainer.global_batch_size
        for start in range(0, len(self._prompts), size):
            yield list(range(start, min(start + size, len(self._prompts))))

    def _roll_out(self, questions: list[int]) -> dict[str, Any]:
        from mindspeed_rl.trainer.utils.transfer_dock import put_prompts_experience

        trainer = self._trainer
        dock, samples = trainer.transfer_dock, trainer.n_samples_per_prompt
        # The dock takes whole iterations: repeat the last question until it is full, and drop the repetitions.
        full = questions + [questions[-1]] * (trainer.global_batch_size - len(questions))
        batch = {
            "prompts": [torch.from_numpy(self._prompts[index]).long() for index in full],
            columns.RECORD: [torch.tensor([index]) for index in full],
        }
        rows, indexes = put_prompts_experience(batch, samples, [columns.RECORD])
        fetch(dock.put_experience.remote(data_dict=rows, indexes=indexes, is_prompt=True))
        trainer.actor_worker.generate_sequences(blocking=True)
        trainer.actor_worker.wait_all_ref_objs_run_over()
        # Every row with every column, of the repetitions too: what came after the dock is cleared would be the next
        # iteration's.
        judged_by = ["responses", "response_length", columns.RECORD]
        others = ["input_ids", *([columns.ROLLOUT_LOG_PROBS] if self._settings.rollout_log_probs else [])]
        rows_of_all = list(range(len(full) * samples))
        everything = read_rows(dock, [*judged_by, *others], rows_of_all, stall_timeout=self._settings.stall_timeout)
        wanted = list(range(len(questions) * samples))
        responses = {name: everything[name][: len(wanted)] for name in judged_by}
        judged: dict[str, Any] = fetch(self._graders[0].judge_rows.remote(responses, wanted, str(self._file)))
        judged.pop("texts")
        fetch(dock.clear.remote())
        return judged
