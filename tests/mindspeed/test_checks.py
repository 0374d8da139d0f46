"""Plan and checks of a cluster run: memory by hand; each check by code, key and value."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from coca_mindspeed.config.checks import HF_KEYS, steps_of_epochs
from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.config.model_size import GIB, model_parameters
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import facts_of
from coca_mindspeed.errors import ConfigError, Problem
from coca_mindspeed.mindspeed.checks import layout_problems
from coca_mindspeed.mindspeed.plan import checkpoint_bytes, estimate_memory, make_plan
from coca_mindspeed.mindspeed.resolved_config import resolve_config
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from tests.tables import read_table

ON_ASCEND = [name for name in ready_made_runs() if "_910" in name]
ACTOR = "mindspeed_rl.actor_config."
GENERATE = "mindspeed_rl.generate_config."
RL = "mindspeed_rl.rl_config."


_SEVEN = resolve_config(compose_run("qwen25_7b_910b").run)


@pytest.mark.parametrize("name", ON_ASCEND)
def test_ready_made_runs_have_the_papers_settings_and_hold(name):
    run = compose_run(name).run
    plan = make_plan(run)
    assert plan.problems == ()
    resolved = plan.resolved
    assert (resolved.prompts, resolved.group, resolved.max_new, resolved.mini_batch) == (128, 16, 4096, 128)
    assert (resolved.top_k, resolved.top_p, resolved.min_p, run.rollout.temperature) == (-1, 1.0, 0.0, 1.0)
    assert run.mindspeed_rl["generate_config"]["sampling_config"]["temperature"] == 1.0
    assert run.mindspeed_rl["actor_config"]["lr"] == run.optimizer.lr == 1e-6
    assert resolved.kl_coefficient == 0
    assert resolved.npus == (8 if name.endswith("910b") else 16)
    assert resolved.npus == resolved.dp * resolved.tp * resolved.pp == resolved.rollout_dp * resolved.rollout_tp
    assert plan.memory is not None
    assert plan.memory.longest_responses > 1
    two = resolve_config(compose_run(name, ["hardware.nodes=2"]).run)
    for each in (resolved, two):  # all prompts are answered in one wave
        assert (each.rollout_tp, each.memory_utilization) == (1, 0.8)
        assert each.max_sequences >= each.engine_responses == 128 * 16 // each.npus
    assert replace(resolved, rollout_dispatch=64).engine_responses == 64


def test_there_are_runs_for_every_model_on_both_machines():
    models = ("qwen25_1p5b", "qwen25_3b", "qwen25_7b", "llama3_8b", "qwen25_7b_taco", "qwen3_8b")
    assert sorted(f"{model}_{machine}" for model in models for machine in ("910b", "910c")) == ON_ASCEND


@pytest.mark.parametrize(
    ("name", "parameters"),  # as the published checkpoints count them
    [
        ("qwen25_1p5b_910b", 1_543_714_304),
        ("qwen25_3b_910b", 3_085_938_688),
        ("qwen25_7b_910b", 7_615_616_512),
        ("llama3_8b_910b", 8_030_261_248),
        ("qwen3_8b_910b", 8_190_735_360),
    ],
)
def test_parameters_are_counted_to_the_last_one(name, parameters):
    assert model_parameters(resolve_config(compose_run(name).run)) == parameters


def test_memory_by_hand():
    """Two layers of hidden 8, 2 heads, 1 group, MLP 16, vocabulary 32, all by the formulas that ``check`` prints."""
    resolved = replace(
        _SEVEN,
        **{"layers": 2, "hidden": 8, "heads": 2, "query_groups": 1, "ffn": 16, "vocab": 32},
        **{"untied_embeddings": True, "qkv_bias": False, "tp": 1, "pp": 1, "cp": 1, "npus": 4, "rollout_tp": 1},
        **{"max_prompt": 40, "max_new": 60, "memory_utilization": 0.5, "max_sequences": 10},
        **dict.fromkeys(("max_model_len", "update_tokens", "max_batched_tokens"), 100),
        **{"memory_gib": 1 / 1024, "reserved_gib": 1 / 2**14},
    )
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
    parameters = 2 * layer + 2 * 32 * 8
    plan = estimate_memory(resolved)
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
    kept = estimate_memory(replace(resolved, offload_optimizer=False))
    assert {part.name: part.bytes for part in kept.rollout}["training state not offloaded"] == training["optimizer"]


def test_what_layouts_do_to_memory():
    def training(**changes):
        return {part.name: part.bytes for part in estimate_memory(replace(_SEVEN, **changes)).training}

    whole, halves = training(tp=2), training(tp=4)
    assert whole["weights"] == 2 * halves["weights"]
    assert whole["optimizer"] == halves["optimizer"]  # half the parameters of a rank, half the ranks to share them
    assert training(distributed_optimizer=False)["optimizer"] == 2 * halves["optimizer"]
    assert training(recompute="full")["activations"] < halves["activations"] / 10
    assert training(sequence_parallel=False)["activations"] > halves["activations"]
    assert training(kl_coefficient=0.1)["reference model"] == halves["weights"]
    pipeline = estimate_memory(replace(_SEVEN, tp=2, pp=2))
    assert max(part.bytes for part in pipeline.training) > 0
    tied = replace(_SEVEN, untied_embeddings=False)
    assert checkpoint_bytes(_SEVEN) == 14 * 7_615_616_512  # 106.6 GB
    both_ends = model_parameters(replace(_SEVEN, pp=2)) - model_parameters(tied)
    assert both_ends == _SEVEN.vocab * _SEVEN.hidden


SHORT = {"A.": ACTOR, "G.": GENERATE, "R.": RL, "T.": "mindspeed_rl.megatron_training."}
REFUSED = read_table(__file__, "refused_runs.tsv")


def full(text: str) -> str:
    return SHORT.get(text[:2], text[:2]) + text[2:]


def problems_of_run(overrides: list[str]) -> tuple[Problem, ...]:
    return make_plan(compose_run("qwen25_7b_910b", overrides).run).problems


@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_refused_runs(overrides, expected):
    """All problems of a run: code, key and value."""
    problems = problems_of_run([full(override) for override in overrides.split()])
    found = [(problem.code, problem.key, json.dumps(problem.value)) for problem in problems]
    rows = [row.split("|") for row in filter(None, expected.split(" "))]
    assert found == [(code, full(key), value) for code, key, value in rows]


@pytest.mark.parametrize(("changes", "code", "field"), read_table(__file__, "refused_layouts.tsv"))
def test_refused_layouts(changes, code, field):
    found = {(problem.code, problem.key) for problem in layout_problems(replace(_SEVEN, **json.loads(changes)))}
    assert (code, field) in found


@pytest.mark.parametrize(
    "overrides",
    [
        f"{RL}actor_update_dispatch_size=1024 {RL}guarantee_order=true trainer.minibatches=2",
        "rollout.temperature=0.7",
        f"{GENERATE}max_num_batched_tokens=2048 {GENERATE}ascend_scheduler_config_enabled=false",
        "optimizer.schedule=cosine",
        "A.tensor_model_parallel_size=2 A.context_parallel_size=2 T.attention_mask_type=general",
        "A.tensor_model_parallel_size=2 A.context_parallel_size=2 A.context_parallel_algo=megatron_cp_algo",
    ],
)
def test_accepted_runs(overrides):
    assert problems_of_run([full(override) for override in overrides.split()]) == ()


@pytest.mark.parametrize(
    ("name", "override", "code", "key"),
    [
        ("demo", "seed=1", "no-cluster", "platform"),
        *(
            ("qwen25_7b_910b", f"{ACTOR}micro_batch_size={v}", "wrong-type", "micro_batch_size")
            for v in ("x", 1.5, "true")
        ),
        *(
            ("qwen25_7b_910b", f"{key}={value}", code, key.rpartition(".")[2])
            for value in ("inf", "nan")
            for key, code in (
                (f"{GENERATE}gpu_memory_utilization", "value_error"),
                (f"{RL}init_kl_coef", "value_error"),
                ("hardware.memory_gib", "finite_number"),
                ("optimizer.lr", "finite_number"),
            )
        ),
    ],
)
def test_runs_without_a_plan(name, override, code, key):
    with pytest.raises(ConfigError) as caught:
        make_plan(compose_run(name, [override]).run)
    assert (code, key) in [(problem.code, problem.key.rpartition(".")[2]) for problem in caught.value.problems]


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
    with pytest.raises(ConfigError) as caught:
        steps_of_epochs(1.0, 10, 128)
    assert "12.8" in caught.value.problems[0].fix


# Checks of the plan itself: files of the machine, sizes of its memory, iterations.
_NOT_COMPARED = {"mindspeed_rl", "model.architecture"} | {
    "data.rows",
    "data.epochs",
    "hardware.memory_gib",
    "hardware.reserved_gib",
    "trainer.steps",
    "data.name",
}


_FACTS = facts_of(RunConfig)
_COMPARED = [
    key
    for key, facts in _FACTS.items()
    if not any(other.startswith(f"{key}.") for other in _FACTS) and key not in _NOT_COMPARED and not facts.cluster
]
_OTHER = dict(read_table(__file__, "other_values.tsv"))


def planned(run: RunConfig) -> tuple[set[str], dict[str, Any]]:
    """Keys with problems, and what the driver reads."""
    plan = make_plan(run)
    values = mindspeed_values(run, plan.iterations or 1, StageFiles(Path("runs/x")))
    return {problem.key for problem in plan.problems}, values


@pytest.fixture(scope="module")
def base() -> tuple[RunConfig, dict[str, Any]]:
    run = compose_run("qwen25_7b_910b", ["trainer.share_prompts=true"]).run
    return run, planned(run)[1]


@pytest.mark.parametrize("key", [key for key in _COMPARED if not key.startswith("model.architecture.")])
def test_no_key_of_ours_is_ignored_in_silence(key, base):
    """Keys of the local engine alone are refused by their facts."""
    value = attrgetter(key)(base[0])
    if key in _OTHER:
        other = _OTHER[key]
    elif isinstance(value, bool):
        other = str(not value).lower()
    elif isinstance(value, int | float):
        other = str(value * 2 or 1)
    else:
        other = "other"
    refused, values = planned(compose_run("qwen25_7b_910b", [f"{key}={other}"]).run)
    assert key in refused or values != base[1]


def test_a_model_of_another_shape_is_refused(tmp_path):
    shape = {
        theirs: getattr(compose_run("qwen25_7b_910b").run.model.architecture, ours) for ours, theirs in HF_KEYS.items()
    }
    file = tmp_path / "config.json"
    for text, codes in (
        (json.dumps(shape), []),
        (json.dumps({**shape, "hidden_size": 5}), ["shapes"]),
        (json.dumps({**shape, "model_type": "qwen3"}), ["shapes"]),
        ("{", ["shapes"]),
    ):
        file.write_text(text)
        assert [problem.code for problem in problems_of_run([f"model.path={tmp_path}"])] == codes
