"""A training step on pretrained weights against TRL's: ``python -m benchmarks.pretrained_step_against_trl MODEL``.

8 prompts x 8 responses of exactly so many tokens, one update in microbatches of 8 responses, float32.  Ours runs as it
is and with layers that are recomputed.  Each way runs in processes of its own, in turn, so that a peak of memory is
its alone.  It runs in the environment of ``make bench-trl``.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.against_trl import AS_OURS, compare, options, print_figures, seconds_of_ours, seconds_of_trls
from benchmarks.our_step import OurStep
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.prompts import encode_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.local.load import load_policy

PROMPTS, GROUP, WARM_UP_STEPS, LR = 8, 8, 1, 1e-6
WAYS = OURS, RECOMPUTING, TRL = "ours", "ours, recomputing", "TRL"
CPU = torch.device("cpu")


def main() -> None:
    parser = options(__doc__, WAYS, 2, Path("runs/bench/pretrained_step_against_trl.json"))
    parser.add_argument("model", type=Path, help="a Hugging Face directory, such as models/smollm2")
    parser.add_argument("--tokens", type=int, default=64, help="of a response (default: 64)")
    arguments = parser.parse_args()
    if arguments.way is None:
        compare(__spec__.name, WAYS, arguments, str(arguments.model), f"--tokens={arguments.tokens}")
        return
    print_figures(partial(_seconds, arguments.way, arguments.model, arguments.tokens), arguments, WARM_UP_STEPS)


def _seconds(way: str, model: Path, tokens: int, steps: int) -> list[float]:
    config = compose_run(
        "local",
        [
            f"model.path={model}",
            "model.compute_dtype=float32",
            "data.train=none.jsonl",
            f"rollout.prompts={PROMPTS}",
            f"rollout.group_size={GROUP}",
            f"rollout.max_new_tokens={tokens}",
            "rollout.batch_responses=64",
            "trainer.minibatches=1",
            "trainer.microbatch_tokens=null",
            "trainer.microbatch_prompts=1",
            f"model.gradient_checkpointing={str(way == RECOMPUTING).lower()}",
        ],
    ).run
    records = arithmetic_records(PROMPTS * steps, "train", 0)
    return (_trl if way == TRL else _ours)(records, config, model, steps)


class ByLength:
    """Grades by length: no response has the format, and groups in which all is equal would teach ours nothing."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [Verdict(Outcome.RIGHT if len(answer) % 2 else Outcome.WRONG) for answer in answers]

    def close(self) -> None:
        """There is nothing to end."""


def _ours(records: Sequence[Record], config: Any, model: Path, steps: int) -> list[float]:
    policy = load_policy(model, config.model, CPU)
    endless = replace(policy, eos_ids=(_unused(policy.tokenizer),))
    return seconds_of_ours(OurStep(endless, list(records), config, LR, ByLength()), steps)


def _trl(records: Sequence[Record], config: Any, model: Path, steps: int) -> list[float]:
    # Here, because ours would have their memory too.
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = encode_prompts(tokenizer, records, config.method.system_prompt)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(_unused(tokenizer))
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
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
        )
        return seconds_of_trls(trainer, updates=1)


def _unused(tokenizer: PreTrainedTokenizerFast) -> int:
    """A token that is hardly ever written takes the place of the end, so that responses are of one length."""
    number: int = tokenizer.all_special_ids[-1]
    return number


if __name__ == "__main__":
    main()
