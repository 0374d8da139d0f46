"""The launch scripts on a ready-made run, real Ray and the real MindSpeed-RL; only the NPU and vLLM are stood in.

``hardware=host`` is the only part of the configuration that a cluster of NPUs would not have; the sizes are scaled
down to the tiny model.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.prompts import render_prompts
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment, free_port, needs_mindspeed
from tests.integration.mindspeed.runs import BUSY_SECONDS, copy_of, finish, json_lines, wait_for_checkpoint
from tests.launch.scripts_for_tests import own_address
from tests.support.waiting import until

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

SMALLEST = "qwen25_1p5b_910b"
# Script, overrides and ranks: packing, dynamic batches, balancing and sequence parallel are on in each, as shipped.
SHIPPED_LAYOUTS = {
    "3B at TP2": ("qwen25_3b_910b", (), 2),
    "7B at TP2 x PP2": ("qwen25_7b_910b", ("parallel=tp2pp2",), 4),
}


def _launch(directory, ray_directory, *arguments, script=SMALLEST, **variables):
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [
                *("bash", str(REPOSITORY / "launch" / f"{script}.sh"), "--output", str(directory / "run")),
                *(*tiny.run_overrides(directory), *arguments),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(
                **{"PYTHON": sys.executable, "RAY_TMPDIR": ray_directory, "RAY_PORT": str(free_port()), **variables}
            ),
        )


def _iterations(stage):
    return [int(row["step"]) for row in json_lines(stage / "metrics.jsonl")]


def test_both_stages_of_a_method_one_after_the_other(warm, tmp_path, ray_directory):
    directory = copy_of(warm, tmp_path)
    log = finish(_launch(directory, ray_directory, "method=sequential", "trainer.steps=2"), directory)
    assert "the Ray cluster has 1 NPUs" in log
    for stage in ("stage0", "stage1"):
        assert _iterations(directory / "run" / stage) == [1, 2]
        rows = json_lines(directory / "run" / stage / "metrics.jsonl")
        norms = [row["actor/grad_norm"] for row in rows]
        # Few groups of the warmed-up model have a spread of rewards: an iteration's last update may have none of them.
        assert all(map(math.isfinite, norms)), norms
        assert max(norms) > 0, norms
        assert all(row["rollout/log_prob_gap"] < 1e-4 for row in rows)
    # The second stage goes on from the first one's weights: it validates them before its first iteration.
    last, first = (
        json_lines(directory / "run" / stage / "validation.jsonl")[at] for stage, at in (("stage0", -1), ("stage1", 0))
    )
    assert abs(last["eval/accuracy"] - first["eval/accuracy"]) < 0.05


def test_a_run_that_was_stopped_is_resumed(warm, tmp_path, ray_directory):
    """The first signal lets the iteration end, which no interval saves."""
    directory = copy_of(warm, tmp_path)
    process = _launch(directory, ray_directory, "trainer.steps=8", "checkpoint.interval=100")
    checkpoints = directory / "run" / "stage0" / "checkpoints"
    marker, log = checkpoints / "latest_checkpointed_iteration.txt", directory / "run" / "stage0" / "metrics.jsonl"
    until(lambda: process.poll() is not None or (log.is_file() and log.read_bytes().count(b"\n") >= 2), BUSY_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=BUSY_SECONDS) == 130, (directory / "log").read_text(errors="replace")[-3000:]
    assert 2 <= int(marker.read_text()) == len(_iterations(directory / "run" / "stage0")) < 8
    again = _launch(directory, ray_directory, "trainer.steps=8")
    assert again.wait(timeout=BUSY_SECONDS) == 1
    assert "already holds a run; add --resume" in (directory / "log").read_text()
    finish(_launch(directory, ray_directory, "trainer.steps=8", "--resume"), directory)
    stage = directory / "run" / "stage0"
    assert _iterations(stage) == list(range(1, 9))
    validations = json_lines(stage / "validation.jsonl")
    assert [row["step"] for row in validations] == [0, 2, 4, 6, 8]
    assert marker.read_text() == "8"
    # The questions go on where they were: none comes twice.
    samples = sorted((directory / "run" / "stage0" / "samples").iterdir())
    assert len(samples) == 8
    prompts = [prompt for file in samples for prompt in {row["prompt"] for row in json_lines(file)}]
    assert len(set(prompts)) == len(prompts)
    # As if it had been killed between its last checkpoint and the validation of it.
    last = validations.pop()
    (stage / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in validations) + '{"step": 8, "ev')
    finish(_launch(directory, ray_directory, "trainer.steps=8", "--resume"), directory)
    assert _iterations(stage) == list(range(1, 9))
    validated = json_lines(stage / "validation.jsonl")
    assert [row["step"] for row in validated] == [0, 2, 4, 6, 8]
    assert abs(validated[-1]["eval/accuracy"] - last["eval/accuracy"]) < 0.25
    finish(_launch(directory, ray_directory, "trainer.steps=8", "--resume"), directory)
    assert "every iteration" in (directory / "log").read_text()


@pytest.mark.parametrize("layout", SHIPPED_LAYOUTS)
def test_a_shipped_layout_trains_and_resumes_after_a_killed_worker(layout, warm, tmp_path, ray_directory):
    """The pad token is not EOS here, as in Qwen2.5."""
    script, overrides, ranks = SHIPPED_LAYOUTS[layout]
    directory = copy_of(warm, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.pad_token = tiny.VOCABULARY_OF_64[0]
    assert tokenizer.pad_token_id not in (0, tokenizer.eos_token_id)
    tokenizer.save_pretrained(directory / "model")
    arguments = (*overrides, f"hardware.npus_per_node={ranks}", "trainer.steps=6")
    process = _launch(directory, ray_directory, *arguments, script=script)
    checkpoints = directory / "run" / "stage0" / "checkpoints"
    marker = checkpoints / "latest_checkpointed_iteration.txt"
    wait_for_checkpoint(process, marker)
    log = (directory / "log").read_text(errors="replace")
    assert marker.exists(), log[-3000:]
    workers = set(re.findall(r"\(ActorWithoutReference pid=(\d+)", log))
    os.kill(int(max(workers)), signal.SIGKILL)
    assert process.wait(timeout=BUSY_SECONDS) == 1
    finish(_launch(directory, ray_directory, *arguments, "--resume", script=script), directory)
    rows = json_lines(directory / "run" / "stage0" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    norms = [row["actor/grad_norm"] for row in rows]
    assert all(map(math.isfinite, norms)), norms
    assert max(norms) > 0, norms
    assert all(row["rollout/log_prob_gap"] < 1e-4 for row in rows)
    assert all(row["rollout/invalid_share"] < 0.5 for row in rows)


def _often_end_by_the_pad_token(model):
    """Let "#" pad and also end responses, as Qwen2.5's <|endoftext|>; a quarter of the responses begin with it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tiny.VOCABULARY_OF_64[0]
    tokenizer.save_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    [record] = arithmetic_records(1, "train", 0)
    [prompt] = render_prompts(tokenizer, [record], training_method("coca").system_prompt)
    with torch.no_grad():
        logits = policy(torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])).logits[0, -1]
        first = int(logits.argmax())
        weights = policy.get_output_embeddings().weight
        weights[tokenizer.pad_token_id] = weights[first] * (1 + math.log(1 / 3) / float(logits[first]))
    policy.save_pretrained(model)


def test_responses_that_end_by_the_pad_token_and_empty_ones(warm, tmp_path, ray_directory):
    """Upstream cuts a response at its first pad token, so that one which begins with it is empty."""
    directory = copy_of(warm, tmp_path)
    _often_end_by_the_pad_token(directory / "model")
    finish(_launch(directory, ray_directory, "trainer.steps=3"), directory)
    stage = directory / "run" / "stage0"
    rows = json_lines(stage / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["actor/grad_norm"]) and row["rollout/log_prob_gap"] < 1e-4 for row in rows)
    samples = [row for file in sorted((stage / "samples").iterdir()) for row in json_lines(file)]
    empty = [row for row in samples if not row["response"]]
    assert 0.1 < len(empty) / len(samples) < 0.5
    assert all(row["confidence"] is None and not row["correct"] for row in empty)
    assert 0.1 < rows[0]["rollout/invalid_share"] < 0.8


def test_two_nodes(warm, tmp_path, ray_directory):
    """Two Ray nodes on this machine, each with one NPU: data-parallel training, a reward worker on each."""
    directory = copy_of(warm, tmp_path)
    variables = {"NNODES": "2", "MASTER_ADDR": own_address(), "RAY_PORT": str(free_port())}
    overrides = ("trainer.steps=2", "method.advantage_scale=batch")
    head = _launch(directory, ray_directory, *overrides, NODE_RANK="0", **variables)
    # Two nodes of one machine share a folder, and would choose the same name for a socket at the same time.
    file = directory / "log"
    until(lambda: "Ray runtime started" in file.read_text(errors="replace") or head.poll() is not None, BUSY_SECONDS)
    worker = _launch(directory, ray_directory, *overrides, NODE_RANK="1", **variables)
    try:
        log = finish(head, directory, timeout=1500)  # a busy machine starts two Ray nodes in minutes
        assert worker.wait(timeout=BUSY_SECONDS) == 0
    finally:
        worker.kill()
    kept = {path.name.partition("-node")[2]: path.read_text() for path in (directory / "run" / "logs").iterdir()}
    assert "the Ray cluster has 2 NPUs" in kept["0.log"]
    assert "the head has ended the cluster" in kept["1.log"]
    assert "the Ray cluster has 2 NPUs" in log
    assert "the head has ended the cluster" in file.read_text(errors="replace")
    assert _iterations(directory / "run" / "stage0") == [1, 2]
    logged = json_lines(directory / "run" / "stage0" / "metrics.jsonl")
    assert all(row["advantage/deviation"] > 0 for row in logged)
