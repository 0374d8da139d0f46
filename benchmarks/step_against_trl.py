"""A training step of ours against TRL's GRPOTrainer: rollout, grade and two updates on 64 prompts x 8 responses.

Same warmed-up tiny model, same prompts, same threads; each way runs in processes of its own, in turn.  ``make
bench-trl`` makes the environment that this needs and runs it.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl import AS_OURS, compare, options, print_figures, seconds_of_ours, seconds_of_trls
from benchmarks.loops_in_turn import WARM_UP_STEPS
from benchmarks.our_step import OurStep
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.inputs import load_data
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.run import warm_start

WAYS = OURS, TRL = "ours", "TRL"
CPU = torch.device("cpu")


def main() -> None:
    parser = options(__doc__, WAYS, 20, Path("runs/bench/step_against_trl.json"))
    parser.add_argument("--model", type=Path, help="the demo's warmed-up model (default: one is warmed up first)")
    arguments = parser.parse_args()
    config = compose_run("demo").run
    records, _ = load_data(config.data)
    if arguments.way is not None:
        if arguments.model is None:
            parser.error("--way: needs --model")
        print_figures(partial(_seconds, arguments.way, arguments.model, config, records), arguments, WARM_UP_STEPS)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or warm_start(config, Path(directory), records, CPU, show_progress=True)
        compare(__spec__.name, WAYS, arguments, f"--model={model}")


def _seconds(way: str, model: Path, config: Any, records: list[Record], steps: int) -> list[float]:
    if way == OURS:
        return seconds_of_ours(OurStep(load_policy(model, config.model, CPU), records, config), steps)
    return _trl(model, records, steps)


def _trl(model: Path, records: list[Record], steps: int) -> list[float]:
    # Here, because ours would have their memory too.
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    answers = {f"{record.question}=": record.answer for record in records}
    parse = ResponseParser(decimals=2)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """CoCA's two rewards as one sum, on TRL's only reward path."""
        parsed = [parse(text) for text in completions]
        correct = [float(p.answer.strip() == answers[q]) for p, q in zip(parsed, prompts, strict=True)]
        rewards = []
        for i, (p, right) in enumerate(zip(parsed, correct, strict=True)):
            group = correct[i // 8 * 8 : i // 8 * 8 + 8]
            gesr = sum(group) / len(group)
            rewards.append(right - (1.0 if p.confidence is None else (p.confidence - gesr) ** 2))
        return rewards

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=reward,
            train_dataset=datasets.Dataset.from_dict({"prompt": list(answers)}),
            args=GRPOConfig(
                **AS_OURS,
                output_dir=directory,
                per_device_train_batch_size=256,
                steps_per_generation=2,
                num_generations=8,
                max_completion_length=16,
                learning_rate=5e-4,
                max_steps=2 * steps,
            ),
        )
        return seconds_of_trls(trainer, updates=2)


if __name__ == "__main__":
    main()
