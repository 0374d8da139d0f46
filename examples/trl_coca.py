"""CoCA in TRL: a ``GRPOTrainer`` with an advantage for each token, and the paper's rewards as reward functions.

    coca-mindspeed demo --output runs/demo                        # makes the tiny model that the example starts from
    python examples/trl_coca.py runs/demo/warm_start              # needs requirements/benchmark-trl.txt

:class:`CocaTrainer` takes one reward function, which returns 1.0 for a right answer, 0.0 for a wrong one and None for
an answer that could not be graded.  Its loss is the paper's with ``loss_type="luspo"``,
``importance_sampling_level="token"`` and ``beta=0.0``.  :func:`rlcr_reward` and :func:`coca_rewards` need no trainer of
their own: TRL adds rewards up, so ``coca_rewards`` in a plain ``GRPOTrainer`` is the ablation ``joint``.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from coca_mindspeed import coca_advantages, parse_response, training_method
from coca_mindspeed.algorithm.methods.base import Outcomes
from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.errors import CocaError
from coca_mindspeed.upstream.fingerprint import fingerprint

Reward = Callable[..., list[float | None]]

#: TRL's private methods that :class:`CocaTrainer` overrides or relies on, with the fingerprints of trl 1.16.0.
FINGERPRINTS = {
    "_generate_and_score_completions": "08b6e8b1964ca32f802226cd902631f012b67edfdd5c0e9c083b2523e5505853",
    "_calculate_rewards": "eae8bfc67d8c5c3370d53c31afe282b2b8dfa5428a6adb5ae6aa0a57f8ed5539",
    "_compute_loss": "9e6fbe80506bd0d4d2eb281fa0a74bcbc6a3a5dc3180106009872a70a987df99",
}


def check_trl(packages: Path = Path(trl.__file__).parents[1]) -> None:
    """Check that TRL's private methods are the ones that :class:`CocaTrainer` was written for.

    Args:
        packages: the directory that holds ``trl/``.

    Raises:
        CocaError: a method differs.
    """
    for name, expected in FINGERPRINTS.items():
        target = f"trl.trainer.grpo_trainer:GRPOTrainer.{name}"
        if (found := fingerprint(packages, target)) != expected:
            raise CocaError(
                f"{target} of trl {trl.__version__} in {packages} has the fingerprint {found[:12]}, expected "
                f"{expected[:12]} of trl 1.16.0: install trl==1.16.0, or compare the two and update FINGERPRINTS"
            )


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, which is a message where the prompts are conversations."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correctness(
    is_right: Callable[[str, str], bool | None],
    *,
    position: Literal["first", "last"] = "first",
    decimals: int | None = None,
) -> Reward:
    """A reward function for the column ``answer`` of the data set.

    Args:
        is_right: from an answer and the gold answer to the verdict; None: it could not be graded.
        position: where the confidence stands; ``last`` for RLCR.
        decimals: digits that a confidence must have; None: any.
    """

    def correct(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float | None]:
        texts = map(completion_text, completions)
        answers = [parse_response(text, position=position, decimals=decimals).answer for text in texts]
        verdicts = [is_right(given, gold) for given, gold in zip(answers, answer, strict=True)]
        return [None if verdict is None else float(verdict) for verdict in verdicts]

    return correct


def _reward(
    name: str,
    correct: Reward,
    earned: Callable[[Outcomes], torch.Tensor],
    num_generations: int,
    decimals: int | None,
    position: ConfidencePosition = "first",
) -> Reward:
    """The rewards of a method, as a TRL reward function."""

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if len(completions) % num_generations:
            raise ValueError(f"expected groups of {num_generations} completions, found {len(completions)} completions")
        given = correct(completions=completions, **columns)
        parsed = [parse_response(completion_text(c), position=position, decimals=decimals) for c in completions]
        stated = [each.confidence for each in parsed]
        right, confidence = (
            torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
            for values in (given, stated)
        )
        right = right.view(-1, num_generations)
        outcomes = Outcomes(right, confidence.view_as(right), right.nanmean(dim=1, keepdim=True), None, -1.0)
        return [None if math.isnan(value) else value for value in earned(outcomes).flatten().tolist()]

    reward.__name__ = name
    return reward


def rlcr_reward(correct: Reward, *, decimals: int | None = None) -> Reward:
    """RLCR (answer first): ``1[right] - (s - 1[right])^2`` of each completion.

    Args:
        correct: returns 1.0, 0.0 or None, as :func:`correctness` with ``position="last"`` does.
        decimals: digits that a confidence must have; None: any.
    """
    return _reward("rlcr", correct, lambda o: o.correct + o.brier(o.correct), 1, decimals, "last")


def coca_rewards(correct: Reward, num_generations: int, *, decimals: int | None = None) -> list[Reward]:
    """CoCA's two rewards: ``-(s - GESR)^2`` of the confidence, and ``1[right]`` of the answer.

    Args:
        correct: returns 1.0, 0.0 or None, as :func:`correctness` does.
        num_generations: completions of each prompt; they follow each other.
        decimals: digits that a confidence must have; None: any.
    """
    return [
        _reward("coca_confidence", correct, lambda o: o.brier(o.gesr), num_generations, decimals),
        _reward("coca_answer", correct, lambda o: o.correct, num_generations, decimals),
    ]


class CocaTrainer(GRPOTrainer):
    """A ``GRPOTrainer`` whose confidence and answer tokens have advantages of their own.

    ``scale_rewards`` and ``reward_weights`` have no effect: :func:`coca_advantages` normalises the rewards.

    Each process should hold whole groups: ``per_device_train_batch_size * steps_per_generation`` is a multiple of
    ``num_generations``.  For evaluation, ``num_generations_eval`` is at least 2.
    """

    def __init__(self, *args: Any, coca: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Make the trainer.

        Args:
            *args: of ``GRPOTrainer``.
            coca: keyword arguments of :func:`coca_advantages`, such as ``method``, ``decimals`` and ``eps``.
            **kwargs: of ``GRPOTrainer``.  ``reward_funcs`` is one function that returns 1.0, 0.0 or None.

        Raises:
            CocaError: an unknown version of TRL.
            ValueError: more than one reward function.
        """
        check_trl()
        super().__init__(*args, **kwargs)
        self._coca = dict(coca or {})
        self._scored: tuple[list[int], torch.Tensor] | None = None
        if len(self.reward_funcs) != 1:
            raise ValueError(f"reward_funcs should be one function of correctness, found {len(self.reward_funcs)}")

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Keep this process's completion lengths and verdicts, NaN where an answer could not be graded."""
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        self._scored = [len(ids) for ids in completion_ids_list], rewards[start : start + len(prompts), 0].cpu()
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Replace TRL's advantages, ``[B]``, by ``[B, T]``; its loss takes both."""
        mode = "train" if self.model.training else "eval"
        group = self.num_generations if mode == "train" else self.num_generations_eval
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._scored is not None
        lengths, verdicts = self._scored
        if not bool(((verdicts == 0) | (verdicts == 1) | verdicts.isnan()).all()):
            raise ValueError(f"{self.reward_func_names[0]} should return 1.0, 0.0 or None, found {verdicts.unique()}")
        found = coca_advantages(
            output["completion_ids"],
            torch.tensor(lengths, device=output["completion_ids"].device),
            verdicts,
            getattr(self.processing_class, "tokenizer", self.processing_class),
            group,
            **self._coca,
        )
        output["advantages"] = found.advantages
        of_processes = self.accelerator.gather(
            torch.tensor([list(found.metrics.values())], device=found.advantages.device, dtype=torch.float32)
        )
        for name, value in zip(found.metrics, of_processes.nanmean(dim=0).tolist(), strict=True):
            self._metrics[mode][name].append(value)
        return output


def sums(size: int, split: Any) -> datasets.Dataset:
    """The demo's arithmetic questions as conversations, with the column ``answer``."""
    system = {"role": "system", "content": training_method("coca").system_prompt}
    records = arithmetic_records(size, split, seed=0)
    return datasets.Dataset.from_list(
        [{"prompt": [system, {"role": "user", "content": r.question}], "answer": r.answer} for r in records]
    )


def demo_trainer(model: Path, output: Path, rollouts: int, seed: int = 0) -> CocaTrainer:
    """The trainer of the demo: 64 prompts x 8 completions in a rollout, two updates of each."""
    is_right = lambda answer, gold: answer.strip() == gold  # noqa: E731
    return CocaTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=correctness(is_right, decimals=2),
        train_dataset=sums(50_000, "train"),
        eval_dataset=sums(500, "evaluate"),
        coca={"decimals": 2, "max_confidence_tokens": 6, "eps": 0.05},
        args=GRPOConfig(
            output_dir=str(output),
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            loss_type="luspo",
            importance_sampling_level="token",
            beta=0.0,
            epsilon=0.2,
            temperature=1.0,
            top_k=0,
            num_generations=8,
            per_device_train_batch_size=256,
            steps_per_generation=2,
            gradient_accumulation_steps=1,
            per_device_eval_batch_size=1000,
            num_generations_eval=2,
            max_completion_length=16,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=2 * rollouts,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )


def evaluated(trainer: CocaTrainer) -> dict[str, float]:
    """ECE, accuracy and the share of invalid responses on 500 held-out questions, two samples of each."""
    trainer.evaluate()
    logged = trainer.state.log_history[-1]
    names = ("ece", "accuracy", "confidence", "invalid_share")
    return {name: round(logged[f"eval_rollout/{name}"], 4) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description="CoCA in TRL on the demo's tiny model")
    parser.add_argument("model", type=Path, help="runs/demo/warm_start")
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/trl_coca"))
    arguments = parser.parse_args()
    trainer = demo_trainer(arguments.model, arguments.output, arguments.rollouts, arguments.seed)
    before = evaluated(trainer)
    trainer.train()
    print(json.dumps({"before": before, "after": evaluated(trainer)}, indent=2))


if __name__ == "__main__":
    main()
