"""CoCA on a server with Tinker's API (Thinking Machines, verl_tinker, SkyRL, twinkle); docs/library.md.

    pip install tinker
    python examples/tinker_coca.py Qwen/Qwen3-4B-Instruct-2507 data/big_math/train.jsonl --base-url http://localhost:8000

The loop of tinker-cookbook's ``rl_loop``, with one advantage per token in place of one per response.  The records are
those of docs/data.md.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from coca_mindspeed import coca_advantages, parse_response, token_text, training_method
from coca_mindspeed.data.prompts import encode_prompts
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.unevaluated import reject_unevaluated


def datum(
    prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float]
) -> Any:
    """One response of T tokens: each position predicts the next token, and those of the prompt have advantage 0."""
    before = len(prompt) - 1
    columns = {
        "target_tokens": torch.tensor([*prompt[1:], *response]),
        "logprobs": torch.tensor([0.0] * before + list(logprobs)),
        "advantages": torch.tensor([0.0] * before + list(advantages)),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *response[:-1]]),
        loss_fn_inputs={name: types.TensorData.from_torch(column) for name, column in columns.items()},
    )


def train(
    trainer: Any,
    tokenizer: Any,
    records: Sequence[Record],
    *,
    steps: int,
    prompts: int,
    group: int,
    max_tokens: int,
    lr: float,
) -> list[dict[str, float]]:
    """Train ``trainer``, a Tinker training client, and return the metrics of each step (docs/troubleshooting.md)."""
    grader = build_grader("auto")
    table = token_text(tokenizer, len(tokenizer))
    sampling = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[tokenizer.eos_token_id])
    log = []
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client()
        asked = [records[(step * prompts + i) % len(records)] for i in range(prompts)]
        asked_ids = encode_prompts(tokenizer, asked, training_method("coca").system_prompt)
        futures = [sampler.sample(types.ModelInput.from_ints(ids), group, sampling) for ids in asked_ids]
        sequences = [sequence for future in futures for sequence in future.result().sequences]  # group by group
        lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
        ids = pad_sequence([torch.tensor(sequence.tokens) for sequence in sequences], batch_first=True)
        answers = [parse_response(text).answer for text in table.decode(ids, lengths)]
        questions = [record for record in asked for _ in range(group)]
        verdicts = reject_unevaluated(questions, answers, grader.grade(questions, answers))
        found = coca_advantages(ids, lengths, [verdict.correct_or_none for verdict in verdicts], table, group)
        data = [
            datum(asked_ids[i // group], sequence.tokens, sequence.logprobs, row[: len(sequence.tokens)])
            for i, (sequence, row) in enumerate(zip(sequences, found.advantages.tolist(), strict=True))
        ]
        update = trainer.forward_backward(data, loss_fn="importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=lr, beta1=0.9, beta2=0.95, eps=1e-8))
        update.result(), stepped.result()
        log.append(found.metrics)
        print(json.dumps({"step": step + 1, **{name: round(value, 4) for name, value in found.metrics.items()}}))
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description="CoCA on a server with Tinker's API")
    parser.add_argument("model", help="base model of the server, and the directory or hub id of its tokenizer")
    parser.add_argument("records", type=Path)
    parser.add_argument("--base-url")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=4e-5)
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    sizes = {name: getattr(arguments, name) for name in ("steps", "prompts", "group", "max_tokens", "lr")}
    trainer = service.create_lora_training_client(base_model=arguments.model, rank=arguments.rank)
    train(trainer, AutoTokenizer.from_pretrained(arguments.model), list(read_records(arguments.records)), **sizes)


if __name__ == "__main__":
    main()
