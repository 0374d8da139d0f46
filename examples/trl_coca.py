"""CoCA in TRL on the demo's arithmetic; docs/frameworks.md describes the trainer.

    coca-mindspeed demo --output runs/demo                        # makes the tiny model that the example starts from
    python examples/trl_coca.py runs/demo/warm_start              # needs the extra trl

Prints ECE, accuracy, mean confidence and the share of invalid responses before and after, on 500 held-out questions
with two samples of each.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer
from trl import GRPOConfig

from coca_mindspeed import method_settings
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.export import trl_row
from coca_mindspeed.integrations.trl import CocaTrainer


def sums(size: int, split: Any, **method: Any) -> datasets.Dataset:
    """The demo's questions, as ``coca-mindspeed data export trl`` writes them for the settings of a method."""
    prompt = method_settings(**method).system_prompt
    return datasets.Dataset.from_list([trl_row(r, prompt, i) for i, r in enumerate(arithmetic_records(size, split, 0))])


def demo_trainer(model: Path, output: Path, rollouts: int, seed: int = 0, **given: Any) -> CocaTrainer:
    """The trainer of the demo: 64 prompts x 8 completions in a rollout, two updates of each."""
    options: dict[str, Any] = {
        "output_dir": str(output),
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "loss_type": "luspo",  # the paper's sum over tokens, since the ratio is of tokens
        "beta": 0.0,
        "epsilon": 0.2,
        "num_generations": 8,
        "per_device_train_batch_size": 256,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 1000,
        "num_generations_eval": 2,
        "max_completion_length": 16,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "max_steps": 2 * rollouts,
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }
    method = {"confidence_decimals": 2, "max_confidence_tokens": 6, "advantage_eps": 0.05}
    defaults = {
        "coca": {"method": method},
        "train_dataset": sums(50_000, "train"),
        "eval_dataset": sums(500, "evaluate"),
        "processing_class": AutoTokenizer.from_pretrained(model, padding_side="left"),
    }
    return CocaTrainer(
        model=str(model),
        args=GRPOConfig(**options | given.pop("options", {})),
        **defaults | given,
    )


def evaluated(trainer: CocaTrainer) -> dict[str, float]:
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
