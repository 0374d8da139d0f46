"""Weights to Megatron's form, trained, and back, by the scripts and MindSpeed-LLM's real converter, on a CPU."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.inputs import read_warm_up_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.run_directory import WARMED_UP
from coca_mindspeed.local.sft import run_sft_warm_up
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment, free_port, needs_mindspeed
from tests.integration.mindspeed.runs import json_lines

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

# The first step of Adam moves no weight by more than the learning rate, but for the rounding of float32.
_ADAM_STEP = 1e-3 * (1 + 1e-5)
SMOLLM2 = REPOSITORY / "models" / "smollm2"
_ROLLOUT_OF_SMOLLM2 = ("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=24", "rollout.group_size=4")


def _warm_qwen2(directory):
    tiny.write_model(directory / "model", warm_up_steps=150)


def _untrained_llama31(directory):
    tiny.write_model(directory / "model", config=tiny.llama31_config())


def _untrained_qwen3(directory):
    sizes = {**tiny.llama_config().to_dict(), "head_dim": 16, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}
    policy = tiny.write_model(directory / "model", config=Qwen3Config(**{**sizes, "model_type": "qwen3"}))
    for name, weight in policy.model.named_parameters():
        if "norm" in name:  # all ones are equal in any order
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    policy.model.save_pretrained(directory / "model")
    # A prompt that ends inside an open thought is refused, so the run passes only with its enable_thinking: false.
    policy.tokenizer.chat_template += "{% if enable_thinking | default(true) %}<think>{% endif %}"
    policy.tokenizer.save_pretrained(directory / "model")


def _warm_llama_of_smollm2s_heads(directory):
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    tiny.write_model(directory / "model", config=tiny.llama_config(**heads), warm_up_steps=150)


def _warm_smollm2(directory):
    """The real weights, tokenizer and template, which are taught the format as ``train local`` would teach it."""
    data = [f"data.train={directory / 'train.jsonl'}", f"warm_up.records={directory / 'train.jsonl'}"]
    lessons = ["warm_up.steps=24", "warm_up.batch=8", "warm_up.lr=1e-4", "method.confidence_decimals=2"]
    settings = [*data, *lessons, *_ROLLOUT_OF_SMOLLM2, f"model.path={SMOLLM2}", "model.compute_dtype=float32"]
    run = compose_run("local", [*settings, "trainer.microbatch_prompts=null", "trainer.microbatch_tokens=1000"]).run
    policy = load_policy(SMOLLM2, run.model, torch.device("cpu"))
    run_sft_warm_up(policy, read_warm_up_records(run), run, directory, show_progress=False)
    (directory / WARMED_UP).rename(directory / "model")


@dataclass(frozen=True)
class Case:
    """A model, the ready-made run that trains its architecture, and how Megatron cuts it.

    Attributes:
        run: its name.
        write: writes the model into a directory, which holds the questions already.
        tensor: TP.
        pipeline: PP.
        settings: of the run, besides those for the tiny model.
        learns: whether it states confidences, so that there is something to prefer.
    """

    run: str
    write: Callable[[Path], None]
    tensor: int = 1
    pipeline: int = 1
    settings: tuple[str, ...] = ()
    learns: bool = True


CASES = {
    "qwen2": Case("qwen25_1p5b_910b", _warm_qwen2, tensor=2),
    "llama31": Case("llama3_8b_910b", _untrained_llama31, pipeline=2, learns=False),
    "qwen3": Case("qwen3_8b_910b", _untrained_qwen3, tensor=2, learns=False),
    "tied llama, 9 heads, 3 groups": Case("llama3_8b_910b", _warm_llama_of_smollm2s_heads, pipeline=2),
    "smollm2": Case(
        "llama3_8b_910b",
        _warm_smollm2,
        settings=(*_ROLLOUT_OF_SMOLLM2, "rollout.prompts=4", "method.max_confidence_tokens=16"),
    ),
}


def _script(directory, script, *arguments, ray_directory="/nonexistent"):
    log = directory / "log"
    with log.open("ab") as output:
        done = subprocess.run(
            ["bash", str(REPOSITORY / "launch" / script), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
            env=environment(PYTHON=sys.executable, RAY_TMPDIR=ray_directory, RAY_PORT=str(free_port())),
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]


def half_ulp_of_bfloat16(weights):
    """How far what was rounded to each of ``weights`` (bfloat16's eight bits of significand) can be from it."""
    ulps = torch.exp2(torch.frexp(weights.float()).exponent - 9.0)
    return torch.where(weights == 0, 0.0, ulps)


def _weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.parametrize("name", CASES)
def test_there_trained_and_back(name, tmp_path, ray_directory):
    case = CASES[name]
    if case.write is _warm_smollm2 and not SMOLLM2.is_dir():
        pytest.skip("needs SmolLM2's weights in models/smollm2 (make real)")
    tiny.write_questions(tmp_path, train=64, evaluate=8)
    case.write(tmp_path)
    actor = "mindspeed_rl.actor_config"
    settings = [
        *tiny.run_overrides(tmp_path),
        *(f"hardware.npus_per_node={case.tensor * case.pipeline}", f"model.megatron_path={tmp_path / 'mcore'}"),
        *(f"{actor}.tensor_model_parallel_size={case.tensor}", f"{actor}.pipeline_model_parallel_size={case.pipeline}"),
        *("optimizer.lr=1e-3", "evaluation.interval=0", "trainer.steps=1"),
        *("mindspeed_rl.coca.host.initial_weights=null", f"{actor}.load={tmp_path / 'mcore'}"),
        *case.settings,
    ]
    before = _weights(tmp_path / "model")

    _script(tmp_path, "convert_weights.sh", "hf2mcore", case.run, *settings)
    untouched = tmp_path / "untouched"
    (untouched / "stage0").mkdir(parents=True)
    (untouched / "stage0" / "checkpoints").symlink_to(tmp_path / "mcore")
    _script(tmp_path, "convert_weights.sh", "mcore2hf", case.run, "--output", str(untouched), *settings)
    returned = _weights(untouched / "hf")
    assert returned.keys() == before.keys()
    for each, weight in before.items():
        assert torch.equal(returned[each].bfloat16(), weight.bfloat16()), each

    trained = tmp_path / "trained"
    _script(tmp_path, f"{case.run}.sh", "--output", str(trained), *settings, ray_directory=ray_directory)
    (row,) = json_lines(trained / "stage0" / "metrics.jsonl")
    assert row["rollout/log_prob_gap"] < 1e-4
    assert (row["rollout/invalid_share"] < 0.5) == case.learns
    _script(tmp_path, "convert_weights.sh", "mcore2hf", case.run, "--output", str(trained), *settings)
    after = _weights(trained / "hf")
    assert after.keys() == before.keys()
    for each, weight in returned.items():  # from these, which bfloat16 holds exactly, training began
        assert ((after[each] - weight).abs() <= _ADAM_STEP + half_ulp_of_bfloat16(after[each])).all(), each
    if case.learns:
        assert any(not torch.equal(after[each].bfloat16(), weight.bfloat16()) for each, weight in before.items())
