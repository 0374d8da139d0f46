"""The plan of a local run: its rows, its memory against hand counts and what autograd keeps, and refusals."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.load import checkpoint_activations
from coca_mindspeed.local.plan import (
    Batch,
    MemoryEstimate,
    estimate_memory,
    largest_microbatch,
    largest_sample,
    make_plan,
    memory_problems,
)
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.utils.process import GIB
from tests.local.models_for_tests import SHAPE, Kept, write_random_model

OURS = {**SHAPE, "vocab_size": 300, "intermediate_size": 256, "num_hidden_layers": 3}
LLAMA = LlamaConfig(tie_word_embeddings=False, **OURS)
CPU = torch.device("cpu")


def run_of(*overrides, path="somewhere"):
    rollout = ("prompts=8", "group_size=4", "max_prompt_tokens=12", "max_new_tokens=50", "batch_responses=null")
    trainer = ("device=cpu", "minibatches=1", "microbatch_tokens=null", "microbatch_prompts=1")
    run = [f"model.path={path}", "data.train=train.jsonl", "model.compute_dtype=float32", "evaluation.interval=0"]
    run += [*(f"rollout.{key}" for key in rollout), *(f"trainer.{key}" for key in trainer)]
    return compose_run("local", [*run, "model.gradient_checkpointing=false", *overrides]).run


@pytest.mark.parametrize("config", [LLAMA, Qwen2Config(tie_word_embeddings=True, **OURS)], ids=["llama", "qwen2"])
def test_weights_gradients_moments_and_cache_by_hand(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    count = sum(weight.numel() for weight in model.parameters())
    need = estimate_memory(run_of(), config, shapes, CPU)
    assert (need.weights, need.gradients, need.moments) == (4 * count, 4 * count, 8 * count)
    assert need.cache == 32 * 62 * 2 * 2 * 8 * 3 * 4  # responses, tokens, keys and values, heads, size, layers, bytes
    by_config = estimate_memory(run_of(), config, {}, CPU)
    assert by_config.weights == pytest.approx(4 * count, rel=0.02)
    eight = estimate_memory(run_of("optimizer.name=adamw_8bit"), config, shapes, CPU)
    assert eight.moments < need.moments
    both = estimate_memory(run_of("model.compute_dtype=bfloat16"), config, shapes, CPU)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert both.weights == pytest.approx(4 * count + 2 * linear, rel=5e-3)  # biases, too
    adapters = estimate_memory(run_of("model.lora.rank=2", "model.lora.base_dtype=bfloat16"), config, shapes, CPU)
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_those_that_a_pass_keeps(dtype, recompute, attention):
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 50}
    config = LlamaConfig(num_attention_heads=6, num_key_value_heads=2, attn_implementation=attention, **shape)
    model = AutoModelForCausalLM.from_config(config)
    model.model.norm = torch.nn.Identity()  # behind the layers
    if recompute:
        checkpoint_activations(model)
    policy = Policy(model, None, None, (1,), 0, getattr(torch, dtype))
    kept, ids = Kept(model), torch.ones(4, 62, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda saved: saved), policy.autocast():
        policy.lm_head.hidden_states(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    run = run_of(
        f"model.compute_dtype={dtype}",
        f"model.gradient_checkpointing={str(recompute).lower()}",
        f"model.attention={attention}",
        "trainer.share_prompts=false",
    )
    need = estimate_memory(run, config, {}, CPU)
    layers = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
    copies = 2 * layers if dtype == "bfloat16" and not recompute else 0  # checkpointing keeps them elsewhere
    expected = need.activations - (4 * 4 * 62 * 64 * 4 if recompute else 0)  # keys and values, in the cache
    assert sum(kept.sizes.values()) - copies == pytest.approx(expected, rel=0.15)


TOKENS = ("trainer.microbatch_prompts=null", "trainer.microbatch_tokens=1000")


@pytest.mark.parametrize(
    ("overrides", "phase", "gib", "key", "fix"),
    [
        ((), "activations", 10, None, ""),  # 11 of 10 GiB with the weights: the formula errs by a few percent
        (("trainer.microbatch_prompts=4",), "activations", 12, "trainer.microbatch_prompts", "below 4"),
        ((), "activations", 12, "trainer.microbatch_prompts", "model.gradient_checkpointing=true"),
        (TOKENS, "activations", 12, "trainer.microbatch_tokens", "below 1000"),
        ((), "cache", 12, "rollout.batch_responses", "below 32"),
        ((), "moments", 12, "model.path", "model.lora.rank"),
    ],
)
def test_a_run_that_does_not_fit_names_the_key_to_lower(overrides, phase, gib, key, fix):
    need = MemoryEstimate(**{**dict.fromkeys(MemoryEstimate._fields, 0), "weights": GIB, phase: gib * GIB})
    problems = memory_problems(run_of(*overrides), need, 10 * GIB)
    codes = {"activations": "memory-update", "cache": "memory-rollout", "moments": "memory-weights"}
    assert [(problem.code, problem.key) for problem in problems] == [(codes[phase], key)] * (key is not None)
    assert all(fix in problem.fix for problem in problems)


@pytest.mark.parametrize(("dtype", "number", "copied"), [("float32", 4, 0), ("bfloat16", 2, 2)])
def test_the_buffers_of_a_gpu_by_hand(monkeypatch, dtype, number, copied):
    run = run_of(f"model.compute_dtype={dtype}")
    linear = 300 * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 256)
    buffers = number * 32 * 128 * 2 * 2 * 8 * 3 + copied * linear  # rows, columns, keys and values, heads, size, layers
    found = []
    for memory_of_device in (16 * buffers - 1, 16 * buffers):  # up to a sixteenth is kept
        properties = SimpleNamespace(total_memory=memory_of_device)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        found.append(estimate_memory(run, LLAMA, {}, torch.device("cuda")))
    freed, kept = found
    assert freed.cache == kept.cache == buffers + 4 * 8 * 12 * 2 * 2 * 8 * 3  # and the prompts as they were prefilled
    assert (freed.decoder, kept.decoder, kept.update - freed.update) == (0, buffers, buffers)


RUN = ("rollout.prompts=8", "rollout.group_size=4", "rollout.max_prompt_tokens=30", "rollout.max_new_tokens=10")


@pytest.mark.parametrize(
    ("overrides", "row", "shown"),
    [
        ("", "step", "8 prompts x 4 responses = 32"),
        ("trainer.minibatches=2 trainer.ppo_epochs=3", "updates per step", "6 of 4 prompts"),
        ("trainer.microbatch_prompts=2", "microbatches", "2 prompts"),
        ("trainer.minibatches=4", "microbatches", "2 prompts"),
        ("trainer.microbatch_tokens=512", "microbatches", "up to 512 tokens"),
        ("", "tokens", "30 + 10 at most"),
        ("evaluation.interval=5", "evaluation while training", "every 5 steps"),
        ("evaluation.interval=0", "evaluation while training", "none"),
        ("checkpoint.interval=7 checkpoint.keep=3", "checkpoints", "1 MB every 7 steps, the newest 3 are kept"),
        ("checkpoint.minutes=30", "checkpoints", "1 MB every 100 steps and every 30 minutes, the newest 2 are kept"),
        ("checkpoint.interval=0", "checkpoints", "1 MB at the last step, the newest 2 are kept"),
        ("method=sequential trainer.steps=9", "length", "9 steps per stage"),
    ],
)
def test_rows_of_a_plan(overrides, row, shown):
    assert dict(make_plan(compose_run("demo", [*RUN, *overrides.split()]).run).rows)[row] == shown


def test_a_plan_that_does_not_fit_has_its_memory_and_the_problems(tmp_path, monkeypatch):
    model = write_random_model(tmp_path / "model", "qwen2")
    run = compose_run("local", [f"model.path={model}", "data.train=t.jsonl", "trainer.device=cpu", *RUN]).run
    assert make_plan(run).problems == ()
    monkeypatch.setattr("coca_mindspeed.local.plan.free_bytes", lambda _: 2**20)
    plan = make_plan(run)
    assert [problem.code for problem in plan.problems] == ["memory-update", "memory-rollout"]
    update, rollout = plan.memory
    assert (update.name, rollout.name, update.limit_gib) == ("update", "rollout", 1 / 1024)
    assert update.bytes_of("weights") == rollout.bytes_of("weights") > 0
    assert update.bytes_of("activations") > 0 == rollout.bytes_of("activations")
    assert update.gib > update.limit_gib
