"""A training step of ours against TRL's GRPOTrainer: rollout, grade and two updates on 64 prompts x 8 responses.

Same tiny model, same prompts, same threads, in turn in one process.  ``make bench-trl`` makes the environment that
this needs (TRL wants another transformers than MindSpeed-RL does) and runs it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.our_step import OurStep
from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.files import write_json
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.session import load_data, warm_start

WARM_UP_CYCLES = 3
#: TRL's settings by which it trains as our step does, on a CPU, and writes nothing.
AS_OURS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "epsilon": 0.2,
    "max_grad_norm": 1.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 10_000,
    "disable_tqdm": True,
}


class InTurn(TrainerCallback):  # type: ignore[misc]
    """Times TRL's cycles of one rollout and its updates, and runs one of our steps, if there are any, after each."""

    def __init__(self, ours: OurStep | None, updates: int = 2) -> None:
        self.ours, self.updates = ours, updates
        self.seconds: dict[str, list[float]] = {"ours": [], "trl": []}
        self._start = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates:
            return
        self.seconds["trl"].append(time.perf_counter() - self._start)
        self.run_ours()
        self._start = time.perf_counter()

    def run_ours(self) -> None:
        """Run one of our steps, if there are any."""
        if self.ours is None:
            return
        start = time.perf_counter()
        self.ours()
        self.seconds["ours"].append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/step_against_trl.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(Path(directory), arguments.cycles)
    medians = {name: statistics.median(values[WARM_UP_CYCLES:]) for name, values in seconds.items()}
    result = {**medians, "ratio": medians["trl"] / medians["ours"], "threads": arguments.threads}
    write_json(arguments.output, result)
    print(f"ours {medians['ours']:.3f} s, TRL {medians['trl']:.3f} s, {result['ratio']:.2f} times as fast")


def measure(directory: Path, cycles: int) -> dict[str, list[float]]:
    """Seconds of every cycle of both."""
    config = compose_run("demo").run
    records, _ = load_data(config.data)
    path = warm_start(config, directory, records, torch.device("cpu"), show_progress=True)
    ours = OurStep(load_policy(path, config.model, torch.device("cpu")), records, config)
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

    in_turn = InTurn(ours)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": list(answers)}),
        args=GRPOConfig(
            **AS_OURS,
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=256,
            steps_per_generation=2,
            num_generations=8,
            max_completion_length=16,
            learning_rate=5e-4,
            max_steps=2 * (cycles + WARM_UP_CYCLES),
        ),
        callbacks=[in_turn],
    )
    trainer.train()
    return in_turn.seconds


if __name__ == "__main__":
    main()
