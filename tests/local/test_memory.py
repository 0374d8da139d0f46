"""Memory estimates against hand counts, real passes and the RSS of a process."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, __version__

from coca_mindspeed.cli.check import _check_local
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local import checks
from coca_mindspeed.local import memory as footprints
from coca_mindspeed.local.checks import check_memory, memory_problems
from coca_mindspeed.local.memory import NotEstimatedError, estimate_memory, largest_microbatches
from coca_mindspeed.local.update import largest_group_sizes, microbatches
from tests.local.models_for_tests import set_chunk_of
from tests.local.test_self_test import ARCHITECTURES, config_of

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN = Qwen2Config(tie_word_embeddings=True, **SHAPE)
LLAMA = LlamaConfig(tie_word_embeddings=False, **SHAPE)
SMALL = (
    "model.compute_dtype=float32",
    "rollout.batch_responses=null",
    "rollout.prompts=8",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=12",
    "rollout.max_new_tokens=50",
    "evaluation.interval=0",
    "model.gradient_checkpointing=false",
    "trainer.microbatch_tokens=null",
    "trainer.microbatch_prompts=1",
)


def run_of(*overrides, path="somewhere"):
    run = f"model.path={path}", "data.train=train.jsonl", "trainer.minibatches=1"
    return compose_run("local", [*run, *SMALL, *overrides]).run


def test_weights_gradients_and_moments_by_hand():
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    need = estimate_memory(run_of(), LLAMA)
    assert need.parameters == need.trained == 2 * 300 * 32 + layer + 32
    biases = 32 + 2 * 16
    assert estimate_memory(run_of(), QWEN).parameters == 300 * 32 + layer + 32 + biases
    assert (need.gradients, need.moments) == (4 * need.parameters, 8 * need.parameters)
    assert 4 * need.parameters <= need.weights < 4.1 * need.parameters  # and the frequencies of the positions


def test_keys_and_values_by_hand():
    """Two heads of 8, keys and values, one layer, float32.  Room grows in steps, never beyond the longest sequence."""
    for prompt in (5, 8, 11, 12):
        of_one = (prompt + 50) * 2 * 8 * 2 * 4
        assert estimate_memory(run_of(f"rollout.max_prompt_tokens={prompt}"), QWEN).cache == 8 * 4 * of_one
    assert estimate_memory(run_of("rollout.batch_responses=9"), QWEN).cache == 2 * 4 * of_one


def test_many_short_responses_to_long_prompts_are_looked_at_too():
    """A shared prompt counts once towards a microbatch's tokens; its keys and values are there for every response."""
    tokens = ("rollout.max_prompt_tokens=400", "trainer.microbatch_prompts=null", "rollout.group_size=8")
    run = run_of(*tokens, "trainer.microbatch_tokens=1000")
    assert largest_microbatches(run) == [
        (400, 50, [8]),
        (400, 22, [8, 1]),  # a row more needs a prompt more
        (400, 12, [8, 8]),  # two prompts leave 200 tokens for 16 responses
        (16, 50, [8, 8, 3]),  # 950 tokens of the longest responses, and three prompts
        (317, 2, [8, 8, 8]),  # a third prompt
        (400, 3, [8, 8]),  # two tokens behind 400 are 804 pairs, three would be more than products attend to
    ]
    wide = run_of(*tokens, "trainer.microbatch_tokens=30000")
    assert largest_microbatches(wide) == [(400, 50, [8] * 8)]
    short = run_of(*tokens, "trainer.microbatch_tokens=1000", "rollout.max_new_tokens=12")
    assert estimate_memory(run, QWEN).update >= estimate_memory(short, QWEN).update


@pytest.mark.slow
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(("prompt", "longest", "limit"), [(20, 200, 400), (200, 20, 380)])
def test_no_microbatch_of_a_step_needs_more_than_was_planned(share_prompts, prompt, longest, limit, monkeypatch):
    """Of responses and prompts of many lengths, all alike or not, the passes that their split makes."""
    group = 4
    run = run_of(
        f"rollout.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={longest}",
        f"rollout.group_size={group}",
        "trainer.microbatch_prompts=null",
        f"trainer.microbatch_tokens={limit}",
        f"trainer.share_prompts={share_prompts}",
    )
    planned = estimate_memory(run, QWEN).update
    random = np.random.default_rng(0)
    shapes = set()
    for share in (0.06, 0.5, 0.95, 1.0):
        alike = [max(1, int(share * longest))] * (8 * group)
        for lengths in (alike, random.integers(1, max(2, int(share * longest)), size=8 * group).tolist()):
            for prompts in ([prompt] * 8, random.integers(1, prompt, size=8).tolist()):
                for part in microbatches(range(8), group, lengths, prompts, run.trainer):
                    response = max(lengths[row] for row in part.rows)
                    if response <= 1:
                        continue
                    shapes.add((max(prompts[p] for p in part.prompts), response, tuple(part.group_sizes)))
    most = {}  # of the passes with as many rows the one with most tokens
    for shape in shapes:
        rows = sum(shape[2])
        tokens = rows * shape[1] + shape[0] * (len(shape[2]) if share_prompts else rows)
        most[rows] = max(most.get(rows, (0,)), (tokens, shape))
    shapes = [footprints.LargestMicrobatch(p, r, list(sizes)) for _, (p, r, sizes) in most.values()]
    monkeypatch.setattr(footprints, "largest_microbatches", lambda run: shapes)
    assert estimate_memory(run, QWEN).update <= 1.03 * planned


@pytest.mark.parametrize(
    ("groups", "inner", "longest", "limit"), [(8, 384, 60, 1000), (1, 64, 100, 2000)], ids=["rows", "products"]
)
def test_no_length_of_response_needs_more_than_was_planned(groups, inner, longest, limit, monkeypatch):
    """The most rows are those of responses of two tokens; short texts hold a number for each pair of tokens."""
    heads = {"num_attention_heads": max(8, 16 // groups), "num_key_value_heads": groups, "head_dim": 16}
    model = LlamaConfig(**SHAPE | heads | {"hidden_size": 128, "intermediate_size": inner})
    run = run_of(
        f"rollout.max_prompt_tokens={longest}",
        f"rollout.max_new_tokens={longest}",
        "rollout.group_size=8",
        "rollout.prompts=16",
        "trainer.microbatch_prompts=null",
        f"trainer.microbatch_tokens={limit}",
    )
    planned = estimate_memory(run, model).update
    for response in (2, 3, 6, 9, 11, 24, longest):
        group_sizes = largest_group_sizes(16, 8, response, longest, run.trainer)
        shape = footprints.LargestMicrobatch(longest, response, group_sizes)
        monkeypatch.setattr(footprints, "largest_microbatches", lambda run, shape=shape: [shape])
        assert estimate_memory(run, model).update <= 1.05 * planned, shape


def test_a_device_that_repeats_keys_and_values_is_estimated_so(monkeypatch):
    monkeypatch.setattr(footprints, "_FRAGMENTS", 0)  # a CPU's alone
    alike = estimate_memory(run_of(), QWEN)
    monkeypatch.setattr(footprints, "choose_device", lambda name: torch.device("cuda"))
    repeated = estimate_memory(run_of(), QWEN)
    assert repeated.rollout >= alike.rollout  # equal with transformers 5, which repeats none for a single token
    assert repeated.update > alike.update


def test_merging_adapters_needs_a_second_model_on_the_cpu(monkeypatch):
    adapted = estimate_memory(run_of("model.lora.rank=2", "model.lora.base_dtype=bfloat16"), QWEN)
    plain = estimate_memory(run_of(), QWEN).parameters
    assert adapted.merged == 4 * plain
    *_, problem = memory_problems(adapted, adapted.export_peak - 1, run_of("model.lora.rank=2"), QWEN)
    assert problem[:2] == ("memory-export", "model.lora.rank")
    monkeypatch.setattr(footprints, "choose_device", lambda name: torch.device("cuda"))
    assert estimate_memory(run_of("model.lora.rank=2"), QWEN).merged == 0
    assert estimate_memory(run_of(), QWEN).merged == 0


def test_an_evaluation_may_sample_more_at_once_than_a_step():
    of_one = 62 * 2 * 8 * 2 * 4
    evaluating = "evaluation.interval=50"
    assert estimate_memory(run_of(evaluating), QWEN).cache == 512 * of_one
    assert estimate_memory(run_of(evaluating, "evaluation.questions=40"), QWEN).cache == 40 * of_one
    assert estimate_memory(run_of(evaluating, "evaluation.questions=20"), QWEN).cache == 8 * 4 * of_one  # the step's
    after = ("data.evaluate=held_out.jsonl", "evaluation.final_questions=40")  # the moments are still there then
    assert estimate_memory(run_of(*after), QWEN).cache == 40 * of_one
    # Eight groups of one prompt each, or thirty-two prompts: as many rows, and more prompts to read at once.
    long = ("rollout.batch_responses=32", "rollout.max_prompt_tokens=300", "rollout.max_new_tokens=4")
    step, both = (estimate_memory(run_of(*long, *more), QWEN) for more in ((), (evaluating,)))
    assert both.cache == step.cache
    assert both.rollout > step.rollout
    need = estimate_memory(run_of(evaluating), QWEN)
    room = need.weights + need.moments + need.rollout // 8
    *_, problem = memory_problems(need, room, run_of(evaluating), QWEN)
    value = int(problem.fix.rpartition("rollout.batch_responses=")[2])
    assert 32 < value < 512
    assert estimate_memory(run_of(evaluating, f"rollout.batch_responses={value}"), QWEN).rollout_peak <= room
    assert estimate_memory(run_of(evaluating, f"rollout.batch_responses={value + 4}"), QWEN).rollout_peak > room


def test_fewer_rows_at_a_time_and_recomputed_layers_and_adapters_need_less():
    need = estimate_memory(run_of("trainer.microbatch_prompts=4"), QWEN)
    half = estimate_memory(run_of("trainer.microbatch_prompts=2"), QWEN)
    assert half.update == pytest.approx(need.update / 2, rel=0.05)
    assert half.rollout == need.rollout
    assert (
        estimate_memory(run_of("trainer.microbatch_prompts=4", "rollout.max_new_tokens=100"), QWEN).update
        > 1.9 * need.update
    )
    four_layers = Qwen2Config(**{**QWEN.to_dict(), "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4})
    kept = estimate_memory(run_of("trainer.microbatch_prompts=4"), four_layers)
    recomputed = estimate_memory(
        run_of("trainer.microbatch_prompts=4", "model.gradient_checkpointing=true"), four_layers
    )
    assert recomputed.update < 0.6 * kept.update
    adapted = estimate_memory(run_of("trainer.microbatch_prompts=4", "model.lora.rank=2"), QWEN)
    assert adapted.trained == adapted.parameters - need.parameters
    assert adapted.gradients == 4 * adapted.trained


def test_logits_by_chunks_are_not_held_at_once(monkeypatch):
    wide = Qwen2Config(tie_word_embeddings=True, **SHAPE | {"vocab_size": 5_000})
    set_chunk_of(monkeypatch, 1_000, 5_000)
    whole = estimate_memory(run_of(), wide)
    set_chunk_of(monkeypatch, 64, 5_000)
    chunked = estimate_memory(run_of(), wide)
    logits = 4 * 50 * 5_000 * 4
    assert chunked.update < whole.update - 2 * logits


def test_nothing_of_a_model_that_no_machine_holds_is_made():
    """150 billion parameters: sizes alone."""
    giant = Qwen2Config(
        vocab_size=151_936,
        hidden_size=65_536,
        intermediate_size=262_144,
        num_hidden_layers=2,
        num_attention_heads=512,
        num_key_value_heads=64,
    )
    assert estimate_memory(run_of(), giant).weights > 2**39


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.microbatch_prompts=8",),
        ("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=1984", "trainer.share_prompts=false"),
    ],
)
def test_the_value_that_is_named_is_the_nearest_that_fits(settings, monkeypatch):
    run = run_of(*settings)
    need = estimate_memory(run, QWEN)
    estimated = []
    monkeypatch.setattr(
        checks,
        "estimate_memory",
        lambda config, architecture: estimated.append(config.trainer) or estimate_memory(config, architecture),
    )
    key = next(setting for setting in settings if "null" not in setting).split("=")[0]
    room = need.weights + need.gradients + need.moments + need.update // 2
    [problem] = memory_problems(need, room, run, QWEN)
    assert run.trainer not in estimated, "the run's own estimate is known"
    assert all(estimated.count(trainer) == 1 for trainer in estimated)
    assert (problem.code, problem.key) == ("memory-update", key)
    _, _, named = problem.fix.partition("it fits with ")
    assert named.startswith(f"{key}=")
    value = int(named.split("=")[1])
    unit = 124 if "tokens" in key else 1  # a sixteenth of 1984
    assert estimate_memory(run_of(*settings, f"{key}={value}"), QWEN).update_peak <= room
    assert estimate_memory(run_of(*settings, f"{key}={value + unit}"), QWEN).update_peak > room


def test_the_rollout_that_does_not_fit_is_cut_into_batches():
    run = run_of("trainer.microbatch_prompts=1")
    need = estimate_memory(run, QWEN)
    room = need.weights + need.moments + need.rollout // 2
    *_, problem = memory_problems(need, room, run, QWEN)
    assert problem[:3] == ("memory-rollout", "rollout.batch_responses", None)
    value = int(problem.fix.rpartition("rollout.batch_responses=")[2])
    assert value % 4 == 0
    assert estimate_memory(run_of(f"rollout.batch_responses={value}"), QWEN).rollout_peak <= room
    assert estimate_memory(run_of(f"rollout.batch_responses={value + 4}"), QWEN).rollout_peak > room


def test_recomputed_layers_are_proposed_where_a_smaller_microbatch_is_not_enough():
    run = run_of("trainer.microbatch_prompts=1")
    lean = estimate_memory(run_of("trainer.microbatch_prompts=1", "model.gradient_checkpointing=true"), QWEN)
    [problem, *_] = memory_problems(estimate_memory(run, QWEN), lean.update_peak, run, QWEN)
    assert problem.fix.endswith("it fits with trainer.microbatch_prompts=1 model.gradient_checkpointing=true")
    [problem, *_] = memory_problems(estimate_memory(run, QWEN), lean.weights, run, QWEN)
    assert "no smaller value is enough, nor is model.gradient_checkpointing=true" in problem.fix


def test_a_run_that_cannot_fit_is_refused_before_its_weights_are_looked_for(tmp_path, monkeypatch):
    large = Qwen2Config(**SHAPE | {"vocab_size": 700_000, "hidden_size": 64})
    large.save_pretrained(tmp_path)
    run = run_of("trainer.microbatch_prompts=1", path=tmp_path)
    check_memory(run, tmp_path, torch.device("cpu"))
    monkeypatch.setattr(checks, "device_bytes", lambda device: GIB // 2)
    for check in (lambda: check_memory(run, tmp_path, torch.device("cpu")), lambda: _check_local(run, "local", True)):
        with pytest.raises(ConfigError) as caught:
            check()
        problem = caught.value.problems[0]
        assert problem[:3] == ("memory-update", "trainer.microbatch_prompts", 1)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gptj", "codegen"])
def test_experts_and_positions_that_are_no_buffers_are_estimated(name):
    architecture, own, attention, _ = ARCHITECTURES[name]
    config = config_of(architecture, own)
    need = estimate_memory(run_of(f"model.attention={attention}"), config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert need.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert need.update > 0
    longer = estimate_memory(run_of(f"model.attention={attention}", "rollout.max_new_tokens=100"), config)
    assert longer.update > 1.5 * need.update


def test_experts_share_the_tokens():
    """Each token goes to two experts, however many there are."""
    _, own, *_ = ARCHITECTURES["qwen3_moe"]
    few, many = (
        estimate_memory(run_of(), config_of("qwen3_moe", {**own, "num_experts": experts, "num_hidden_layers": 1}))
        for experts in (4, 16)
    )
    assert many.update == pytest.approx(few.update, rel=0.1)


@pytest.mark.skipif(not __version__.startswith("4."), reason="transformers 5 multiplies all experts at once")
def test_an_architecture_that_cannot_be_estimated_is_let_through_with_a_warning(tmp_path, monkeypatch, capsys):
    """GraniteMoe makes a list of the number of tokens of each expert."""
    config_of("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}).save_pretrained(tmp_path)
    run = run_of(path=tmp_path)
    monkeypatch.setattr(checks, "_SMALL", 0)
    with pytest.raises(NotEstimatedError, match="granitemoe"):
        estimate_memory(run, checks.read_model_config(tmp_path, run.model))
    check_memory(run, tmp_path, torch.device("cpu"))
    assert capsys.readouterr().err.count("\n") == 1
    _check_local(run, "local", True)
    assert capsys.readouterr().err.count("\n") == 1


def test_sft_stages_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no row is wrapped
    LLAMA.save_pretrained(tmp_path)
    _check_local(run_of("trainer.microbatch_prompts=1", path=tmp_path), "local", False)
    assert "before training" not in capsys.readouterr().out
    stages = ("warm_up.records=format.jsonl", "warm_up.steps=7", "warm_up.batch=3")
    _check_local(run_of("trainer.microbatch_prompts=1", *stages, path=tmp_path), "local", False)
    rows = [line for line in capsys.readouterr().out.splitlines() if "before training" in line]
    assert len(rows) == 1
    assert f"{12 + 4 * 50} tokens" in rows[0]
    assert "format.jsonl" in rows[0]


_SMOLLM2_135M = LlamaConfig(
    num_hidden_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49_152,
    tie_word_embeddings=True,
)
_QWEN25_05B = Qwen2Config(
    num_hidden_layers=24,
    hidden_size=896,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151_936,
    tie_word_embeddings=True,
)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "gib"), [(_SMOLLM2_135M, 6), (_QWEN25_05B, 16)], ids=["135M", "0.5B"])
def test_the_defaults_of_local_fit_small_machines(architecture, gib):
    run = compose_run("local", ["model.path=x", "data.train=x", "data.evaluate=y", "trainer.device=cpu"]).run
    dtype = {"compute_dtype": "float32"}  # needs more than bfloat16
    need = estimate_memory(run.model_copy(update={"model": run.model.model_copy(update=dtype)}), architecture)
    assert max(need.update_peak, need.rollout_peak) < gib * GIB


MEASURED = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.lm_head import add_embedding_gradients
from coca_mindspeed.local.memory import largest_microbatches, responses_of, update_pass
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.policy import Policy

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

def pass_of(shape, overrides):
    run = compose_run("local", ["model.path=x", "data.train=x", *overrides]).run
    policy = Policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).eval(), None, None, (1,), 0)
    use_fast_attention(policy.model, torch.device("cpu"))
    add_embedding_gradients(policy.model, torch.device("cpu"))
    moments = [torch.ones_like(p) for p in policy.trained_parameters() for _ in range(2)]
    for _ in range(2):  # an update has several
        update_pass(responses_of(policy, largest_microbatches(run)[-1], run))

torch.set_num_threads(1)
shape, overrides = json.loads(sys.argv[1])
pass_of({**shape, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
         "vocab_size": 64, "num_hidden_layers": 1}, [*overrides, "rollout.max_new_tokens=2", "rollout.group_size=2"])
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
pass_of(shape, overrides)
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(("hidden", "layers", "vocabulary"), [(256, 6, 2_000), (384, 2, 8_000), (512, 4, 2_000)])
def test_the_estimate_is_within_15_percent_of_the_peak_of_a_process(hidden, layers, vocabulary):
    shape = {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    overrides = ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=64", "rollout.group_size=8"]
    overrides += ["trainer.microbatch_tokens=null", "trainer.microbatch_prompts=4"]
    overrides += ["model.compute_dtype=float32", "model.gradient_checkpointing=false"]
    run = compose_run("local", ["model.path=x", "data.train=x", *overrides]).run
    need = estimate_memory(run, AutoConfig.for_model(**shape))
    code = [sys.executable, "-c", MEASURED, json.dumps([shape, overrides])]
    keeping = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # freed memory, as the estimate assumes
    done = subprocess.run(code, env={**os.environ, **keeping}, capture_output=True, text=True, check=True)
    assert need.update_peak == pytest.approx(int(done.stdout), rel=0.15)
