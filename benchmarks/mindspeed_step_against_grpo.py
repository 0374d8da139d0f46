"""An iteration of this project on MindSpeed-RL against MindSpeed-RL's own GRPO.

`python -m benchmarks.mindspeed_step_against_grpo MODEL`, in the port's environment, with the checkouts named as
docs/port.md says.  All are runs of the real MindSpeed-RL without an NPU, in turn: the same weights, data (in
MindSpeed-RL's own preprocessed form), group, updates, engine that samples, and verifier, MindSpeed-RL's `acc`.
MindSpeed-RL's GRPO runs once with a KL term and once with `init_kl_coef` 0; it runs its reference either way.  The
learning rate is 0 and the order guaranteed, so that every run rolls out the same responses.

What differs by nature: ours also parses confidences, finds where they end, keeps the rollout's log-probabilities, and
gives each segment its own advantage and statistics; MindSpeed-RL's grades and compares with its reference.  The tiny
model has no letters to write a box with, and `acc` wants one: every answer is compared, and then wrong.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.loops_in_turn import WARM_UP_STEPS, Figures, in_turn, medians, options, processor_seconds_a_step, table
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.prompts import bounded_prompt_tokens
from coca_mindspeed.local.tiny_model import EOS
from coca_mindspeed.mindspeed.start.driver import find_checkouts
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.runs import DRIVER, finish, start_driver
from tests.integration.processes import processor_seconds

PROMPTS, MAX_PROMPT = 32, 32
OURS, WITH_KL, WITHOUT_KL = "ours", "GRPO", "GRPO, init_kl_coef 0"
OWN_GRPO = "benchmarks.mindspeed_own_grpo"
WAYS: dict[str, dict[str, Any]] = {
    OURS: {"init_kl_coef": 0.0, "module": DRIVER},
    WITH_KL: {"init_kl_coef": 0.05, "module": OWN_GRPO},
    WITHOUT_KL: {"init_kl_coef": 0.0, "module": OWN_GRPO},
}


def main() -> None:
    arguments = options(str(__doc__), Path("runs/bench/mindspeed_step_against_grpo.json"))
    steps = arguments.steps + WARM_UP_STEPS
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(arguments.model.absolute(), directory / "model")
        write_data(directory, PROMPTS * steps)
        write_megatron_weights(directory)
        ways = {name: partial(measure, directory, steps, **way) for name, way in WAYS.items()}
        least = in_turn(ways, arguments.rounds, arguments.output)
    print("\n".join(table(least, OURS)))


def write_model(source: Path, directory: Path) -> None:
    """Copy the local engine's warmed-up model; the end of a text also pads, as MindSpeed-RL has it."""
    shutil.copytree(source, directory)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(directory)


def write_data(directory: Path, questions: int) -> None:
    """Write questions and answers as MindSpeed-RL's preprocessing does, by its own builder, to ``directory/data``."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    records = arithmetic_records(questions, "train", seed=0)
    system_prompt = method_settings("coca").system_prompt
    prompts = list(bounded_prompt_tokens(tokenizer, records, system_prompt, MAX_PROMPT, "MAX_PROMPT"))
    columns = {
        "input_ids": prompts,
        "attention_mask": [[1] * len(prompt) for prompt in prompts],
        "labels": [tokenizer.encode(record.answer) for record in records],
    }
    # The module alone: the package around it imports what exists beside an NPU.
    source = find_checkouts(os.environ)["MINDSPEED_RL_HOME"] / "mindspeed_rl" / "datasets" / "indexed_dataset.py"
    spec = importlib.util.spec_from_file_location("indexed_dataset", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, rows in columns.items():
        document = directory / f"data_packed_{name}_document"
        builder = module.IndexedDatasetBuilder(f"{document}.bin")
        for row in rows:
            builder.add_item(torch.IntTensor(row))
            builder.end_document()
        builder.finalize(f"{document}.idx")


def write_megatron_weights(directory: Path) -> None:
    """Let a run of one iteration save the model, which it leaves as it is: the reference is read from there too."""
    run = directory / "weights"
    with started(run, configuration(directory, run, steps=1, init_kl_coef=0.0, load=None), DRIVER) as (process, _):
        finish(process, run)


def measure(directory: Path, steps: int, number: int, *, init_kl_coef: float, module: str) -> Figures:
    """Medians of MindSpeed-RL's own timing and of tokens a response, and processor seconds of a step."""
    run = directory / f"{module}_{init_kl_coef}_{number}"
    config = configuration(directory, run, steps, init_kl_coef, directory / "weights" / "checkpoints")
    with started(run, config, module) as (process, ray_directory):
        processor = processor_seconds_a_step(
            partial(processor_seconds, ray_directory),
            lambda: len(iterations((run / "log").read_text(errors="replace"))),
            lambda: process.poll() is None,
            steps,
        )
        rows = iterations(finish(process, run))
    # Ray ends with the training, and a worker's last line may not have come to the driver by then.
    if len(rows) not in (steps - 1, steps):
        raise RuntimeError(f"{run}: {len(rows)} iterations were reported, expected {steps}")
    return {**medians(rows, list(rows[-1])), "processor": processor}


@contextmanager
def started(run: Path, config: dict[str, Any], module: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A run, and the folder of its Ray; both are gone afterwards."""
    run.mkdir()
    ray_directory = tempfile.mkdtemp(prefix="coca-", dir="/tmp")  # Ray's sockets need a short path
    process = start_driver(run, config, ray_directory, module=module)
    try:
        yield process, ray_directory
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(ray_directory, ignore_errors=True)


def configuration(directory: Path, run: Path, steps: int, init_kl_coef: float, load: Path | None) -> dict[str, Any]:
    """The same for all but the KL coefficient; what the section ``coca`` says does not concern MindSpeed-RL's own."""
    return tiny.configuration(
        directory,
        megatron_training={
            "global_batch_size": PROMPTS,
            "train_iters": steps,
            "data_path": str(directory / "data"),
            "dataset_additional_keys": ["labels"],
            "num_workers": 0,
        },
        actor_config={
            "lr": 0.0,
            "micro_batch_size": 128,
            "save": str(run / "checkpoints"),
            **({"load": str(load)} if load else {}),
        },
        rl_config={
            "guarantee_order": True,
            "init_kl_coef": init_kl_coef,
            "max_prompt_length": MAX_PROMPT,
            "verifier_function": ["acc"],
        },
        coca={"output_dir": str(run / "output"), "host": {} if load else {"initial_weights": str(directory / "model")}},
    )


_REPORT = re.compile(r"iteration: \d+ / \d+ \| (.*)")


def iterations(log: str) -> list[Figures]:
    """What MindSpeed-RL's logger reports of each iteration: seconds in its stages and between them, and tokens."""
    return [_figures(dict(cell.split(" : ") for cell in line.split(" | "))) for line in _REPORT.findall(log)]


def _figures(reported: Mapping[str, str]) -> Figures:
    # Stages come one after the other here, so that what MindSpeed-RL says of their overlap is nothing or a repetition.
    timing = {
        key.removeprefix("timing/"): float(value)
        for key, value in reported.items()
        if key.startswith("timing/") and not key.startswith("timing/non_overlap")
    }
    whole = timing.pop("all")
    rest = whole - sum(timing.values())
    return {**timing, "between the stages": rest, "all": whole, "tokens": float(reported["response_length/mean"])}


if __name__ == "__main__":
    main()
