"""A training step on pretrained weights against TRL's: ``python -m benchmarks.pretrained_step_against_trl MODEL``.

8 prompts x 8 responses of exactly so many tokens, one update in microbatches of 8 responses, float32.  Ours runs as it
is and with layers that are recomputed.  Each way runs in processes of its own, in turn, so that a peak of memory is
its alone.  It runs in the environment of ``make bench-trl``.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.loops_in_turn import Figures, in_turn, table
from benchmarks.our_step import OurStep
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.embedded.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.local.chat import encode_prompts
from coca_mindspeed.local.freed_memory import keep_freed_memory
from coca_mindspeed.local.policy import load_policy

PROMPTS, GROUP, WARM_UP_STEPS, LR = 8, 8, 1, 1e-6
OURS, RECOMPUTING, TRL = WAYS = ("ours", "ours, recomputing", "trl")
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face directory, such as models/smollm2")
    parser.add_argument("--tokens", type=int, default=64, help="of a response (default: 64)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run, behind one (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/pretrained_step_against_trl.json"))
    parser.add_argument("--way", choices=WAYS, help="measure this one alone, and print its figures as JSON")
    arguments = parser.parse_args()
    if arguments.way is not None:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(arguments.way, arguments.model, arguments.tokens, arguments.steps + WARM_UP_STEPS)))
        return
    ways = {way: partial(in_a_process, way, arguments) for way in WAYS}
    print("\n".join(table(in_turn(ways, arguments.rounds, arguments.output), OURS)))


def in_a_process(way: str, arguments: argparse.Namespace, number: int) -> Figures:
    """What :func:`measure` finds, in a process that does nothing else."""
    command = [sys.executable, "-m", __spec__.name, str(arguments.model), "--way", way]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("tokens", "steps", "threads")]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    return figures


def measure(way: str, model: Path, tokens: int, steps: int) -> Figures:
    """Median seconds of a step behind the first, and the process's peak of memory in GiB."""
    config = compose_run(
        "local",
        [
            f"model.path={model}",
            "model.compute_dtype=float32",
            "data.train=none.jsonl",
            f"rollout.prompts={PROMPTS}",
            f"rollout.group_size={GROUP}",
            f"rollout.max_new_tokens={tokens}",
            "trainer.minibatches=1",
            f"model.gradient_checkpointing={str(way == RECOMPUTING).lower()}",
        ],
    ).run
    records = arithmetic_records(PROMPTS * steps, "train", 0)
    seconds = (_trl if way == TRL else _ours)(records, config, model, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step": statistics.median(seconds[WARM_UP_STEPS:]), "peak, GiB": peak / 2**30}


class ByLength:
    """Grades by length: no response has the format, and groups in which all is equal would teach ours nothing."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [Verdict(Outcome.RIGHT if len(answer) % 2 else Outcome.WRONG) for answer in answers]

    def close(self) -> None:
        """There is nothing to end."""


def _ours(records: Sequence[Record], config: Any, model: Path, steps: int) -> list[float]:
    keep_freed_memory()  # as a run does
    policy = load_policy(model, config.model, CPU)
    endless = replace(policy, eos_ids=(_unused(policy.tokenizer),))
    step = OurStep(endless, list(records), config, LR, ByLength())
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _trl(records: Sequence[Record], config: Any, model: Path, steps: int) -> list[float]:
    # Here, because ours would have their memory too.
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.step_against_trl import AS_OURS, InTurn

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = encode_prompts(tokenizer, records, config.method.training_method.system_prompt, 2048)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(_unused(tokenizer))
    timer = InTurn(None, updates=1)
    with tempfile.TemporaryDirectory() as directory:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=lambda prompts, completions, **_: [float(len(text) % 2) for text in completions],
            train_dataset=datasets.Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
            args=GRPOConfig(
                **AS_OURS,
                output_dir=directory,
                per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=PROMPTS,
                num_generations=GROUP,
                max_completion_length=config.rollout.max_new_tokens,
                learning_rate=LR,
                max_steps=steps,
            ),
            callbacks=[timer],
        ).train()
    return timer.seconds["trl"]


def _unused(tokenizer: PreTrainedTokenizerFast) -> int:
    """A token that is hardly ever written takes the place of the end, so that responses are of one length."""
    number: int = tokenizer.all_special_ids[-1]
    return number


if __name__ == "__main__":
    main()
