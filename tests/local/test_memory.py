"""Memory: the formula against hand counts, the measurement by a child process, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local import memory
from coca_mindspeed.local.memory import (
    Batch,
    check_memory,
    estimate_memory,
    largest_microbatch,
    largest_sample,
    measure,
    memory_problems,
)
from coca_mindspeed.utils.process import GIB
from tests.local.models_for_tests import write_random_model
from tests.local.starts_for_tests import arguments

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = LlamaConfig(tie_word_embeddings=False, **SHAPE)
CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")


def run_of(*overrides, path="somewhere"):
    rollout = ("prompts=8", "group_size=4", "max_prompt_tokens=12", "max_new_tokens=50", "batch_responses=null")
    trainer = ("device=cpu", "minibatches=1", "microbatch_tokens=null", "microbatch_prompts=1")
    run = [f"model.path={path}", "data.train=train.jsonl", "model.compute_dtype=float32", "evaluation.interval=0"]
    run += [*(f"rollout.{key}" for key in rollout), *(f"trainer.{key}" for key in trainer)]
    return compose_run("local", [*run, "model.gradient_checkpointing=false", *overrides]).run


@pytest.mark.parametrize("config", [LLAMA, Qwen2Config(tie_word_embeddings=True, **SHAPE)], ids=["llama", "qwen2"])
def test_weights_gradients_moments_and_cache_by_hand(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    count = sum(weight.numel() for weight in model.parameters())
    need = estimate_memory(run_of(), config, shapes)
    assert (need.weights, need.gradients, need.moments) == (4 * count, 4 * count, 8 * count)
    assert need.cache == 32 * 62 * 2 * 2 * 8 * 3 * 4  # responses, tokens, keys and values, heads, size, layers, bytes
    assert estimate_memory(run_of(), config, {}).weights == pytest.approx(4 * count, rel=0.02)  # by config.json alone
    eight = estimate_memory(run_of("optimizer.name=adamw_8bit"), config, shapes)
    assert eight.moments < need.moments
    adapters = estimate_memory(run_of("model.lora.rank=2", "model.lora.base_dtype=bfloat16"), config, shapes)
    assert adapters.weights == 2 * count + adapters.gradients
    assert adapters.gradients < need.gradients / 2


@pytest.mark.parametrize(
    ("overrides", "microbatch", "sample"),
    [
        ((), (1, 4), (8, 32)),
        (("trainer.microbatch_prompts=3", "rollout.batch_responses=9"), (3, 12), (2, 8)),
        (("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=300"), (2, 5), (8, 32)),
        (("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=9"), (1, 1), (8, 32)),
        (("evaluation.interval=5", "evaluation.questions=40"), (1, 4), (40, 40)),
        (("evaluation.interval=5", "evaluation.questions=20"), (1, 4), (8, 32)),
    ],
)
def test_the_largest_batches_of_a_run(overrides, microbatch, sample):
    """As prompts and responses."""
    run = run_of(*overrides)
    assert largest_microbatch(run) == Batch(*microbatch, 12, 50)
    assert largest_sample(run) == Batch(*sample, 12, 50)


TOKENS = ("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=1000")


@pytest.mark.parametrize(
    ("overrides", "phase", "peaks", "key", "fix"),
    [
        ((), "update", (4, 6), None, ""),  # 10 at full size
        (("trainer.microbatch_prompts=4",), "update", (5, 7), "trainer.microbatch_prompts", "below 4"),
        ((), "update", (5, 7), "trainer.microbatch_prompts", "model.gradient_checkpointing=true"),
        (TOKENS, "update", (5, 7), "trainer.microbatch_tokens", "below 1000"),
        ((), "rollout", (5, 7), "rollout.batch_responses", "below 32"),
        ((), "update", (8,), "trainer.microbatch_prompts", "below 1"),  # killed at half
        ((), "rollout", (), "rollout.batch_responses", "max_new_tokens"),
    ],
)
def test_a_phase_that_does_not_fit_names_the_key_to_lower(overrides, phase, peaks, key, fix):
    measured = {phase: [peak * GIB for peak in peaks]}
    problems = memory_problems(run_of(*overrides), measured, int(10.5 * GIB))
    assert [(problem.code, problem.key) for problem in problems] == [(f"memory-{phase}", key)] * (key is not None)
    assert all(fix in problem.fix for problem in problems)
    assert memory_problems(run_of(*overrides), measured, int(10.5 * GIB), eager=True)  # quadratic


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "llama")


@pytest.mark.parametrize(
    ("room", "measured", "code"),
    [(10**12, False, None), (2 * 10**6, True, None), (10**6, True, "memory-update"), (10**5, False, "memory-weights")],
)
def test_only_a_run_that_may_not_fit_is_measured(model, room, measured, code, monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "free_bytes", lambda device: room)
    monkeypatch.setattr(memory, "measure", lambda *_: asked.append(1) or {"update": [10**6, 12 * 10**5]})
    try:
        check_memory(run_of(path=model), CPU)
        found = None
    except ConfigError as error:
        found = error.problems[0].code
    assert (bool(asked), found) == (measured, code)


@pytest.mark.parametrize(
    ("ending", "peaks", "warned"),
    [("kill -9 $$", {"update": [5]}, False), ("echo broken >&2; exit 3", {}, True), ("", {"update": [5]}, False)],
)
def test_a_child_that_is_killed_ends_its_list_and_one_that_fails_is_named(
    ending, peaks, warned, tmp_path, monkeypatch, capsys
):
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\ncat >/dev/null\necho '[\"update\", null]'\necho '[\"update\", 5]'\n{ending}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    assert measure(run_of(), False) == peaks
    assert ("broken" in capsys.readouterr().err) == warned


@linux
@pytest.mark.nightly
def test_a_run_that_does_not_fit_is_refused_before_its_first_step(tmp_path, model, monkeypatch, capsys):
    """By a process of its own, that leaves the run's random numbers as they are."""
    state = torch.random.get_rng_state()
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * 10**6)  # less than Python takes
    assert main(arguments(tmp_path, model)) == 1
    shown = capsys.readouterr().err
    assert "[memory-update]" in shown
    assert "[memory-rollout]" in shown
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.random.get_rng_state(), state)


MEASURED = """
from coca_mindspeed.local import memory
memory._SHARES = (0.0, 0.25, 0.5, 1.0)
memory.main()
"""


@linux
@pytest.mark.nightly
def test_extrapolation_and_formula_against_the_peaks_of_a_process(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 2000}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **shape)
    path = write_random_model(tmp_path / "model", "llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    lengths = ("rollout.max_prompt_tokens=120", "rollout.max_new_tokens=120", "trainer.threads=1")
    run = run_of(*lengths, "trainer.microbatch_prompts=4", path=path)
    request = {"config": run.model_dump(mode="json"), "batches": memory._batches(run)}
    environment = {**os.environ, **memory._ALLOCATOR}
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, input=json.dumps(request), env=environment, stdout=subprocess.PIPE, text=True)
    need, lines = estimate_memory(run, config, {}), [json.loads(line) for line in done.stdout.splitlines()]
    formula = {"update": need.logits + need.activations, "rollout": need.cache}
    for phase, expected in formula.items():
        least, quarter, half, full = (peak for name, peak in lines if name == phase and peak is not None)
        assert half + 2 * (half - quarter) == pytest.approx(full, rel=0.1)
        assert expected == pytest.approx(full - least, rel=0.4)
