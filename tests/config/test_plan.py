"""The plan of a cluster run: numbers by hand, and refusals that name key, value and what would work."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.config.model_size import GIB, model_parameters
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.steps import steps_of_epochs
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.plan.cluster_plan import make_plan, nearest_working
from coca_mindspeed.mindspeed.plan.memory import checkpoint_bytes, memory_plan
from coca_mindspeed.mindspeed.plan.refusals import refusals
from coca_mindspeed.mindspeed.plan.resolved_config import KEYS, RunFacts, read_facts
from coca_mindspeed.mindspeed.plan.rules import violations
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values

ON_ASCEND = [name for name in ready_made_runs() if "_910" in name]
ACTOR = "mindspeed_rl.actor_config."
GENERATE = "mindspeed_rl.generate_config."
RL = "mindspeed_rl.rl_config."


@pytest.fixture(scope="module")
def seven() -> RunFacts:
    return read_facts(compose_run("qwen25_7b_910b").run)


@pytest.mark.parametrize("name", ON_ASCEND)
def test_ready_made_runs_have_the_papers_settings_and_hold(name):
    run = compose_run(name).run
    plan = make_plan(run)
    assert plan.problems == ()
    facts = plan.facts
    assert (facts.prompts, facts.group, facts.max_new, facts.mini_batch) == (128, 16, 4096, 128)
    assert (facts.top_k, facts.top_p, facts.min_p, run.rollout.temperature) == (-1, 1.0, 0.0, 1.0)
    assert run.mindspeed_rl["generate_config"]["sampling_config"]["temperature"] == 1.0
    assert run.mindspeed_rl["actor_config"]["lr"] == run.optimizer.lr == 1e-6
    assert facts.kl_coefficient == 0
    assert facts.npus == (8 if name.endswith("910b") else 16)
    assert facts.npus == facts.dp * facts.tp * facts.pp == facts.rollout_dp * facts.rollout_tp
    assert plan.memory is not None
    assert plan.memory.longest_responses > 1


def test_there_are_runs_for_every_model_on_both_machines():
    models = ("qwen25_1p5b", "qwen25_3b", "qwen25_7b", "llama3_8b", "qwen25_7b_taco")
    assert sorted(f"{model}_{machine}" for model in models for machine in ("910b", "910c")) == ON_ASCEND


@pytest.mark.parametrize(
    ("name", "parameters"),  # as the published checkpoints count them
    [
        ("qwen25_1p5b_910b", 1_543_714_304),
        ("qwen25_3b_910b", 3_085_938_688),
        ("qwen25_7b_910b", 7_615_616_512),
        ("llama3_8b_910b", 8_030_261_248),
    ],
)
def test_parameters_are_counted_to_the_last_one(name, parameters):
    assert model_parameters(read_facts(compose_run(name).run)) == parameters


def test_our_keys_reach_mindspeed_rl_without_being_written_twice():
    overrides = ["rollout.prompts=64", "rollout.group_size=8", "trainer.minibatches=2", "rollout.max_new_tokens=1024"]
    overrides += ["method=joint", "hardware.nodes=2", "optimizer.betas=[0.8,0.9]", "method.clip=0.3", "seed=7"]
    values = compose_run("qwen25_7b_910b", overrides).run.mindspeed_rl
    training, rl, generate = values["megatron_training"], values["rl_config"], values["generate_config"]
    assert (training["global_batch_size"], training["seq_length"], training["seed"]) == (64, 3072, 8)
    assert (rl["n_samples_per_prompt"], rl["mini_batch_size"], rl["clip_ratio"]) == (8, 32, 0.3)
    assert rl["actor_resource"]["num_npus"] == 16
    assert (rl["verifier_function"], values["coca"]["grader"]) == (["coca"], "math")
    assert (generate["max_model_len"], generate["sampling_config"]["max_tokens"]) == (3072, 1024)
    assert (values["actor_config"]["adam_beta1"], values["coca"]["method"]["name"]) == (0.8, "joint")
    assert compose_run("qwen25_7b_taco_910b").run.mindspeed_rl["coca"]["grader"] == "code"


def test_memory_by_hand():
    """Two layers of hidden 8, 2 heads, 1 group, MLP 16, vocabulary 32, all by the formulas of docs/ascend.md."""
    facts = replace(
        read_facts(compose_run("qwen25_7b_910b").run),
        layers=2,
        hidden=8,
        heads=2,
        kv_groups=1,
        ffn=16,
        vocab=32,
        untied_embeddings=True,
        qkv_bias=False,
        tp=1,
        pp=1,
        cp=1,
        npus=4,
        rollout_tp=1,
        max_prompt=40,
        max_new=60,
        seq_length=100,
        max_model_len=100,
        update_tokens=100,
        max_batched_tokens=100,
        max_sequences=10,
        memory_utilization=0.5,
        memory_gib=1 / 1024,
        reserved_gib=1 / 2**14,
    )
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
    parameters = 2 * layer + 2 * 32 * 8
    plan = memory_plan(facts)
    training = {part.name: part.bytes for part in plan.training}
    assert training["weights"] == 2 * parameters
    assert training["gradients"] == 4 * parameters
    assert training["optimizer"] == 12 * parameters / 4
    tokens = 103  # of 100, for microbatches are evened out without regard to the limit
    assert training["activations"] == tokens * 2 * (2 * (6 * 8 + 2 * 4 + 3 * 16))
    assert training["logits"] == tokens * 32 * 12
    rollout = {part.name: part.bytes for part in plan.rollout}
    weights, work = 2 * (parameters + 8), 100 * 2 * (4 * 8 + 3 * 16) + 10 * 32 * 8
    assert rollout["outside of torch"] == GIB / 2**14
    assert rollout["KV cache"] == 0.5 * GIB / 1024 - weights - work - GIB / 2**14
    kv_bytes_per_token = 2 * 2 * 2 * 4  # keys and values, bf16, two layers, one head of 4
    assert plan.longest_responses == rollout["KV cache"] / (kv_bytes_per_token * 100)
    assert rollout["training state not offloaded"] == 0
    kept = memory_plan(replace(facts, offload_optimizer=False))
    assert {part.name: part.bytes for part in kept.rollout}["training state not offloaded"] == training["optimizer"]


def test_what_layouts_do_to_memory(seven):
    def training(**changes):
        return {part.name: part.bytes for part in memory_plan(replace(seven, **changes)).training}

    whole, halves = training(tp=2), training(tp=4)
    assert whole["weights"] == 2 * halves["weights"]
    assert whole["optimizer"] == halves["optimizer"]  # half the parameters of a rank, half the ranks to share them
    assert training(distributed_optimizer=False)["optimizer"] == 2 * halves["optimizer"]
    assert training(recompute="full")["activations"] < halves["activations"] / 10
    assert training(sequence_parallel=False)["activations"] > halves["activations"]
    assert training(kl_coefficient=0.1)["reference model"] == halves["weights"]
    pipeline = memory_plan(replace(seven, tp=2, pp=2))
    assert max(part.bytes for part in pipeline.training) > 0
    tied = replace(seven, untied_embeddings=False)
    both_ends = model_parameters(replace(seven, pp=2)) - model_parameters(tied)
    assert both_ends == seven.vocab * seven.hidden


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [RL + "actor_update_dispatch_size=384", "rollout.prompts=96", "trainer.minibatches=3"],
            "size=384: is not a multiple of a rank's minibatch of 256 responses; nearest that works: 256, 768",
        ),
        ([RL + "partial_rollout_max_split=2"], "split=2: cannot be more than 1: groups must be whole; .* works: 1"),
        (
            [ACTOR + "tensor_model_parallel_size=8"],
            "8: does not divide the 28 attention heads; nearest that works: 4",
        ),
        ([ACTOR + "tensor_model_parallel_size=7"], "size=7: does not divide the 4 key/value groups"),
        ([ACTOR + "tensor_model_parallel_size=0"], "size=0: must be at least 1"),
        ([ACTOR + "pipeline_model_parallel_size=3"], "size=3: does not divide the 28 layers; nearest that works: 1, 2"),
        ([ACTOR + "pipeline_model_parallel_size=4"], "8 NPUs are not a multiple of TP x PP x CP = 4 x 4 x 1 = 16"),
        ([ACTOR + "context_parallel_size=2"], "4 x 2 ranks do not divide the 28 attention heads"),
        (
            [GENERATE + "infer_tensor_parallel_size=3"],
            "size=3: does not divide the 8 NPUs; nearest that works: 1, 2, 4",
        ),
        ([GENERATE + "infer_tensor_parallel_size=8"], "size=8: does not divide the 28 attention heads"),
        (
            [GENERATE + "infer_pipeline_parallel_size=2"],
            "infer_pipeline_parallel_size=2: pipeline parallel rollout is not",
        ),
        (["rollout.prompts=127"], "=127: is not a multiple of the 2 data-parallel ranks; nearest that works: 120, 128"),
        (["rollout.prompts=126"], "rollout.prompts=126: is not a multiple of the 8 rollout engines"),
        ([RL + "mini_batch_size=3"], "=3: does not divide the 128 prompts of an iteration; nearest that works: 2, 4"),
        ([RL + "mini_batch_size=1"], "=1: is not a multiple of the 2 data-parallel ranks; nearest that works: 2, 4, 8"),
        (
            [ACTOR + "micro_batch_size=3"],
            "=3: does not divide the 1024 responses of a data-parallel rank; nearest that works: 1, 2, 4",
        ),
        (
            [RL + "adv_dispatch_size=24"],
            "=24: does not divide the 2048 responses of a rank; nearest that works: 16, 32, 64",
        ),
        (
            [RL + "reward_dispatch_size=8"],
            "reward_dispatch_size=8: does not hold whole groups of 16; nearest that works: 16",
        ),
        (
            [RL + "actor_update_dispatch_size=512"],
            "size=512: is less than a rank's minibatch of 1024 responses; nearest that works: 1024",
        ),
        (
            ["rollout.max_new_tokens=31000"],
            "=31000: with a prompt of 2048 .* the model's context of 32768; nearest that works: 30720",
        ),
        (
            [GENERATE + "max_model_len=4096"],
            "max_model_len=4096: is less than megatron_training.seq_length = 6144; nearest that works: 6144",
        ),
        (
            [GENERATE + "max_num_batched_tokens=2048"],
            "=2048: is less than max_model_len = 6144; nearest that works: 6144",
        ),
        (
            [RL + "update_max_packing_token_size=4096"],
            "cannot hold the longest prompt .* 6144; nearest that works: 6144",
        ),
        ([RL + "use_remove_padding=false"], "=false: use_dynamic_bsz packs responses, .*; nearest that works: true"),
        (
            ["mindspeed_rl.megatron_training.reset_attention_mask=false"],
            "reset_attention_mask=false: use_remove_padding needs true",
        ),
        (["mindspeed_rl.megatron_training.bf16=false"], "bf16=false: MindSpeed-RL trains in bfloat16 only"),
        (
            [GENERATE + "dtype=float16"],
            "dtype=float16: MindSpeed-RL samples in bfloat16 only; nearest that works: bfloat16",
        ),
        (
            [GENERATE + "sampling_config.seed=1"],
            "seed=1: vLLM would draw every prompt's .* the same noise.*nearest that works: null",
        ),
        ([GENERATE + "sampling_config.top_k=50"], "top_k=50: cuts the policy's distribution"),
        ([RL + "verifier_weight=[1.0,0.5]"], "verifier_weight=2: has 2 weights for 1 verifiers"),
        (
            [RL + "partial_rollout_max_split=2", RL + "guarantee_order=true"],
            "partial_rollout_max_split=2: cannot be more than 1",
        ),
        (
            [RL + "actor_update_dispatch_size=512", RL + "guarantee_order=true", RL + "mini_batch_size=64"],
            "size=512: with guarantee_order a rank trains that many of its 1024 responses; nearest that works: 1024",
        ),
        (
            ["rollout.temperature=0.7", ACTOR + "pipeline_model_parallel_size=2"],
            "temperature=0.7: .* with PP it needs 1.0; nearest that works: 1.0",
        ),
        (
            [
                *(ACTOR + "tensor_model_parallel_size=1", ACTOR + "context_parallel_size=2"),
                *(ACTOR + "context_parallel_algo=megatron_cp_algo", RL + "zmq_communication=true"),
                *(RL + "use_remove_padding=false", RL + "use_dynamic_bsz=false"),
            ],
            "use_remove_padding=false: megatron_cp_algo with zmq_communication and an odd TP needs true",
        ),
        (
            ["optimizer.schedule=cosine", "trainer.epochs=2"],
            "schedule=cosine: Megatron would finish it after 1/2 of the run",
        ),
        ([RL + "actor_resource.num_npus=4"], "num_npus=4: hardware has 1 x 8 NPUs; nearest that works: 8"),
        ([RL + "n_samples_per_prompt=8"], "rollout.group_size=16: mindspeed_rl says 8"),
        (
            ["optimizer.eps=1e-5"],
            "optimizer.eps=1e-05: MindSpeed-RL leaves Megatron's value; nearest that works: 1e-08",
        ),
        (["checkpoint.interval=0"], "checkpoint.interval=0: MindSpeed-RL divides by it; nearest that works: 1"),
        (["evaluation.questions=10"], "evaluation.questions=10: validation uses all of data.evaluate"),
        (["model.path=null"], "model.path=null: the built-in tiny model is for the local engine"),
        (["data.epochs=1e-9"], "data.epochs=1e-09: .* less than one step of rollout.prompts=128"),
        (
            ["hardware.memory_gib=36.0"],
            "update_max_packing_token_size=12288: training needs about 39.7 GiB of an NPU's 32.0; .* works: 6144",
        ),
        (
            [GENERATE + "gpu_memory_utilization=0.95"],
            "=0.95: rollout needs about 57.9 GiB of an NPU's 57.0, .*nearest that works: 0.8, 0.85, 0.9",
        ),
        (
            [GENERATE + "gpu_memory_utilization=0.1"],
            "infer_tensor_parallel_size=1: the KV cache holds 0.00 sequences of 6144 tokens",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_key_value_and_what_works(overrides, message):
    problems = make_plan(compose_run("qwen25_7b_910b", overrides).run).problems
    assert problems
    text = "\n".join(map(str, problems))
    assert re.search(message, text), text


@pytest.mark.parametrize(
    "overrides",
    [
        [RL + "actor_update_dispatch_size=1024", RL + "guarantee_order=true", RL + "mini_batch_size=64"],
        ["rollout.temperature=0.7"],
        ["optimizer.schedule=cosine"],
    ],
)
def test_what_can_run_is_not_refused(overrides):
    assert make_plan(compose_run("qwen25_7b_910b", overrides).run).problems == ()


TRAINING = "mindspeed_rl.megatron_training."
FULL = [TRAINING + "recompute_granularity=full"]
ULYSSES = [ACTOR + "tensor_model_parallel_size=2", ACTOR + "context_parallel_size=2"]
RING = [*ULYSSES, ACTOR + "context_parallel_algo=megatron_cp_algo"]


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            FULL,
            [
                "recompute_method=null: .* full needs uniform or block; nearest that works: uniform, block",
                "recompute_num_layers=null: .* full needs a number from 1 to 28; nearest that works: 1, 2, 3",
            ],
        ),
        ([*FULL, ACTOR + "recompute_method=uniform"], ["recompute_num_layers=null"]),
        (
            [*FULL, TRAINING + "recompute_method=block", TRAINING + "recompute_num_layers=29"],
            ["recompute_num_layers=29: .*nearest that works: 26, 27, 28"],
        ),
        (
            [TRAINING + "recompute_granularity=selective", TRAINING + "recompute_method=uniform"],
            ["recompute_method=uniform: recompute_granularity: selective needs null; nearest that works: null"],
        ),
        ([TRAINING + "recompute_granularity=half"], ["recompute_granularity=half: is neither full nor selective"]),
        (ULYSSES, ["attention_mask_type=causal: .* Ulysses .* needs general; nearest that works: general"]),
        ([*RING, ACTOR + "attention_mask_type=general"], ["attention_mask_type=general: .* ring .* needs causal"]),
    ],
)
def test_what_megatron_and_mindspeed_llm_would_refuse(overrides, messages):
    problems = make_plan(compose_run("qwen25_7b_910b", overrides).run).problems
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert re.search(message, str(problem)), str(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        [*FULL, TRAINING + "recompute_method=uniform", TRAINING + "recompute_num_layers=1"],
        [TRAINING + "recompute_granularity=selective"],
        [*ULYSSES, TRAINING + "attention_mask_type=general"],
        RING,
    ],
)
def test_recomputation_and_context_parallel_that_hold(overrides):
    assert make_plan(compose_run("qwen25_7b_910b", overrides).run).problems == ()


def test_pipelines_of_packed_responses_need_no_padding():
    overrides = [ACTOR + "pipeline_model_parallel_size=2", "mindspeed_rl.megatron_training.no_pad_to_seq_lengths=false"]
    (problem,) = make_plan(compose_run("qwen25_7b_910b", overrides).run).problems
    assert problem.key.endswith("no_pad_to_seq_lengths")
    assert problem.works == (True,)


def test_every_problem_of_a_run_is_told_at_once():
    overrides = [GENERATE + "max_model_len=100", ACTOR + "micro_batch_size=3", "optimizer.eps=0.1"]
    keys = {problem.key for problem in make_plan(compose_run("qwen25_7b_910b", overrides).run).problems}
    assert keys == {GENERATE + "max_model_len", ACTOR + "micro_batch_size", "optimizer.eps"}


def test_runs_for_this_machine_have_no_plan():
    with pytest.raises(ConfigError, match=r"hardware.platform is 'local'; choose a machine, hardware=ascend_910b"):
        make_plan(compose_run("demo").run)


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize(
    "key", [GENERATE + "gpu_memory_utilization", RL + "init_kl_coef", "hardware.memory_gib", "optimizer.lr"]
)
def test_numbers_that_are_none(key, value):
    with pytest.raises(ConfigError, match=key.rpartition(".")[2] + r".*finite number"):
        make_plan(compose_run("qwen25_7b_910b", [f"{key}={value}"]).run)


@pytest.mark.parametrize("value", ["two", "1.5", "true"])
def test_values_of_the_wrong_type(value):
    with pytest.raises(ConfigError, match=r"actor_config.micro_batch_size=.*expected a whole number"):
        make_plan(compose_run("qwen25_7b_910b", [ACTOR + f"micro_batch_size={value}"]).run)


def test_iterations_from_the_data(tmp_path):
    assert steps_of_epochs(1.0, 251_122, 128) == 1961
    assert steps_of_epochs(0.5, 251_122, 128) == 980
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "q", "answer": "a"}\n\n' * 1000)
    plan = make_plan(compose_run("qwen25_7b_910b", [f"data.train={file}", "data.epochs=2"]).run)
    assert (plan.rows, plan.rows_from, plan.iterations) == (1000, str(file), 15)
    unknown = make_plan(compose_run("qwen25_7b_910b", ["data.rows=null"]).run)
    assert (unknown.rows, unknown.iterations, unknown.problems) == (None, None, ())
    fixed = make_plan(compose_run("qwen25_7b_910b", ["data.epochs=null", "trainer.steps=7"]).run)
    assert fixed.iterations == 7
    with pytest.raises(ConfigError, match=r"at least 12.8 epochs are needed"):
        steps_of_epochs(1.0, 10, 128)


def test_every_field_that_a_rule_can_name_has_a_key(seven):
    broken = replace(seven, tp=3, pp=5, rollout_tp=3, prompts=127, mini_batch=3, max_model_len=1, bf16=False, top_p=0.9)
    assert {violation.field for violation in violations(broken)} <= KEYS.keys()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 7, 8]),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([4, 12, 64, 100, 128]),
    st.sampled_from([1, 2, 4, 16]),
)
def test_a_layout_that_passes_divides_everything(tp, pp, rollout_tp, prompts, nodes):
    facts = replace(
        _SEVEN, tp=tp, pp=pp, rollout_tp=rollout_tp, prompts=prompts, mini_batch=prompts, nodes=nodes, npus=8 * nodes
    )
    if violations(facts):
        return
    assert facts.dp * tp * pp == facts.npus
    assert facts.rollout_dp * rollout_tp == facts.npus
    assert prompts % facts.dp == prompts % facts.rollout_dp == prompts % nodes == 0
    assert facts.kv_groups % math.lcm(tp, rollout_tp) == 0
    assert facts.layers % pp == 0


_SEVEN = read_facts(compose_run("qwen25_7b_910b").run)


@pytest.mark.parametrize("field", ["tp", "pp", "rollout_tp", "prompts", "mini_batch", "micro_batch"])
@pytest.mark.parametrize("value", [3, 5, 9])
def test_values_that_are_said_to_work_do(field, value):
    broken = _SEVEN.varied(field, value)
    for candidate in nearest_working(broken, field):
        assert not violations(broken.varied(field, candidate)) or {
            v.field for v in violations(broken.varied(field, candidate))
        } <= {v.field for v in violations(broken)} - {field}


def _leaves(section, prefix=""):
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _leaves(inner, f"{prefix}{name}.")
        elif prefix + name not in ("mindspeed_rl", "model.architecture"):
            yield prefix + name


# Another value for each key whose kind does not tell one.
_OTHER = {
    "model.compute_dtype": "float32",
    "model.chat_template_kwargs": "{enable_thinking: false}",
    "model.prompt_date": "2026-01-31",
    "model.attention": "eager",
    "model.lora.base_dtype": "bfloat16",
    "method.name": "rlvr",
    "method.loss_aggregation": "token_mean",
    "method.advantage_ddof": "0",
    "method.invalid_reward": "-0.5",
    "method.clip": "0.3",
    "method.confidence_decimals": "2",
    "data.name": "arithmetic",
    "data.grader": "exact",
    "data.grader_options": "{seconds: 1}",
    "optimizer.name": "adamw_8bit",
    "optimizer.betas": "[0.5,0.6]",
    "optimizer.schedule": "cosine",
    "trainer.device": "cpu",
    "trainer.minibatches": "2",
    "hardware.platform": "host",
    "rollout.prompts": "64",
    "rollout.group_size": "8",
    "warm_up.wrong_answers": "0.5",
    "confidence_start.questions": "20",
    "warm_up.overconfident": "0.5",
    "evaluation.questions": "3",
}
# What the plan itself goes by: files of the machine, sizes of its memory, iterations.
_PLANS = {"data.rows", "data.epochs", "hardware.memory_gib", "hardware.reserved_gib", "trainer.steps"}


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return compose_run("qwen25_7b_910b", ["trainer.share_prompts=true"]).run


@pytest.mark.parametrize("key", sorted(set(_leaves(RunConfig)) - _PLANS))
def test_no_key_of_ours_is_ignored_in_silence(key, base):
    value = base
    for part in key.split("."):
        value = getattr(value, part)
    if key in _OTHER:
        other = _OTHER[key]
    elif isinstance(value, bool):
        other = str(not value).lower()
    elif isinstance(value, int | float):
        other = str(value * 2 or 1)
    else:
        other = "1" if value is None and "int" in str(_annotation(key)) else "other"
    if key == "data.name":  # refused beside data.train, before there is a plan
        with pytest.raises(ConfigError, match="would not be read"):
            compose_run("qwen25_7b_910b", ["data.name=arithmetic"])
        return
    run = compose_run("qwen25_7b_910b", [f"{key}={other}"]).run
    plan, before = make_plan(run), make_plan(base)
    if any(problem.key == key for problem in plan.problems):
        return
    files = StageFiles(Path("runs/x"))
    plan, before = (replace(p, iterations=p.iterations or 1) for p in (plan, before))
    assert mindspeed_values(run, plan, files) != mindspeed_values(base, before, files)


def _annotation(key):
    model = RunConfig
    *sections, name = key.split(".")
    for part in sections:
        model = model.model_fields[part].annotation
    return model.model_fields[name].annotation


def test_what_the_plan_says_would_work_the_hooks_take():
    """The nearest values of a message are not refused by the conditions of the driver, and the other way round."""
    for overrides in (
        [RL + "partial_rollout_max_split=2"],
        [RL + "adv_dispatch_size=24"],
        [RL + "reward_dispatch_size=24"],
        [GENERATE + "sampling_config.seed=3"],
        [RL + "actor_update_dispatch_size=384", "rollout.prompts=96", "trainer.minibatches=3"],
    ):
        run = compose_run("qwen25_7b_910b", overrides).run
        (problem,) = make_plan(run).problems
        assert refusals(run, make_plan(run)) == [str(problem)]
        assert problem.works
        for value in problem.works:
            shown = "null" if value is None else value
            better = compose_run("qwen25_7b_910b", [*overrides, f"{problem.key}={shown}"]).run
            assert refusals(better, make_plan(better)) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (RL + "entropy_coeff=0.1", "rl_config.entropy_coeff: the objective has no entropy term"),
        (RL + "filter_groups_enable=true", "rl_config.filter_groups_enable: .*expected false"),
        (RL + "rule_reward=false", "rl_config.rule_reward: .*expected true"),
        (
            RL + "verifier_function=[coca_math]",
            "rl_config.verifier_function: unknown verifier 'coca_math'; known: coca",
        ),
        ("data.grader=maths", "coca.grader: unknown grader 'maths'; did you mean 'math'"),
        ("mindspeed_rl.coca.keep_checkpoints=0", "coca.keep_checkpoints: Input should be greater"),
    ],
)
def test_check_refuses_what_the_driver_would(override, message):
    run = compose_run("qwen25_7b_910b", [override]).run
    assert re.search("mindspeed_rl.*" + message, "\n".join(refusals(run, make_plan(run))))


def test_slots_and_responses_of_a_rollout_engine(seven):
    assert (seven.engine_responses, replace(seven, rollout_dispatch=64).engine_responses) == (256, 64)


@pytest.mark.parametrize("name", ON_ASCEND)
def test_ready_made_runs_answer_all_prompts_in_one_wave(name):
    for nodes in (1, 2):
        facts = read_facts(compose_run(name, [f"hardware.nodes={nodes}"]).run)
        assert facts.rollout_tp == 1
        assert facts.max_sequences >= facts.engine_responses
        assert facts.memory_utilization == 0.8


def test_a_checkpoint_of_seven_billion_parameters(seven):
    assert checkpoint_bytes(seven) == 14 * 7_615_616_512  # 106.6 GB
