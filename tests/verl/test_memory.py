"""Estimated memory on verl: verl's own examples, with half their devices and without their offloading."""

import json

import pytest

from coca_mindspeed import cli
from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.json_files import write_json, write_json_lines
from coca_mindspeed.verl.memory import (
    cached_sequences,
    checkpoint_gib,
    host_gib,
    memory_warnings,
    phases,
    read_shapes,
)
from coca_mindspeed.verl.plan import make_plan
from coca_mindspeed.verl.requirements import VerlRun
from coca_mindspeed.verl.settings import verl_settings
from tests.tables import read_table
from tests.verl.configurations import configuration

GIB = 2**30
ENGINE = "actor_rollout_ref.actor.fsdp_config"
OFFLOADED = {f"{ENGINE}.param_offload": True, f"{ENGINE}.optimizer_offload": True}


def published(layers, hidden, ffn, heads, groups, vocab, model_type="qwen2", **others):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **others,
    }


#: Of the publishers' config.json, and billions of parameters of their model cards.
MODELS = {
    "qwen2-7b": (published(28, 3584, 18944, 28, 4, 152064), 7.62),
    "qwen2.5-14b": (published(48, 5120, 13824, 40, 8, 152064), 14.8),
    "qwen2.5-32b": (published(64, 5120, 27648, 40, 8, 152064), 32.8),
    "qwen2-72b": (published(80, 8192, 29568, 64, 8, 152064), 72.7),
    "qwen3-8b": (published(36, 4096, 12288, 32, 8, 151936, "qwen3", head_dim=128), 8.19),
    # As torchtune/models/qwen3/_model_builders.py (pytorch/torchtune) and the model card have it.
    "qwen3-0.6b": (
        published(28, 1024, 3072, 16, 8, 151936, "qwen3", head_dim=128, tie_word_embeddings=True),
        0.596,
    ),
}


def shapes_of(tmp_path, model):
    write_json(tmp_path / "config.json", MODELS[model][0])
    shapes = read_shapes(tmp_path)
    assert shapes is not None
    return shapes


def run_of(gib, overrides):
    short = {"actor.": "actor_rollout_ref.actor.", "rollout.": "actor_rollout_ref.rollout."}
    changes = dict(OFFLOADED)
    for key, value in overrides.items():
        prefix = next((word for word in short if key.startswith(word)), "")
        changes[short.get(prefix, "") + key.removeprefix(prefix)] = value
    config = configuration({**changes, "coca.device_memory_gib": gib})
    return VerlRun(config, verl_settings(config))


def codes(run, shapes, npu):
    return {warning.code for warning in memory_warnings(run, shapes, phases(run, shapes, npu=npu))}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_model_cards(tmp_path, model):
    assert shapes_of(tmp_path, model).parameters / 1e9 == pytest.approx(MODELS[model][1], rel=0.005)


EXAMPLES = read_table(__file__, "examples.tsv")


@pytest.mark.parametrize(("name", "model", "gib", "npu", "overrides", "whole", "half", "kept"), EXAMPLES)
def test_verls_examples_as_they_are_with_half_the_devices_and_without_offloading(
    tmp_path, name, model, gib, npu, overrides, whole, half, kept
):
    shapes, values, npu = shapes_of(tmp_path, model), json.loads(overrides), npu == "1"
    assert bool(codes(run_of(float(gib), values), shapes, npu)) == (whole == "refused"), name
    nodes, devices = values.get("trainer.nnodes", 1), values["trainer.n_gpus_per_node"]
    halved = {"trainer.nnodes": nodes // 2} if nodes > 1 else {"trainer.n_gpus_per_node": devices // 2}
    assert bool(codes(run_of(float(gib), {**values, **halved}), shapes, npu)) == (half == "refused")
    without = dict.fromkeys(OFFLOADED, False)
    assert bool(codes(run_of(float(gib), {**values, **without}), shapes, npu)) == (kept == "refused")


def test_the_parts_of_a_small_case(tmp_path):
    """Numbers by hand: 16 devices, 32 billion parameters, microbatches of 2 x 2048 tokens."""
    _, _, _, _, overrides, *_ = EXAMPLES[4]
    shapes, run = shapes_of(tmp_path, "qwen2.5-32b"), run_of(80.0, json.loads(overrides))
    training, rollout = phases(run, shapes, npu=False)
    share = shapes.parameters / 16
    assert training.bytes_of("weights") == training.bytes_of("gradients") == 4 * share
    assert training.bytes_of("optimizer") == rollout.bytes_of("training state not offloaded") - 4 * share == 8 * share
    assert training.bytes_of("activations") == 64 * 4096 * 2 * 5120
    assert training.bytes_of("logits or a layer") == 4096 * 152064 * 2
    assert phases(run, shapes, npu=True)[0].bytes_of("logits or a layer") == 3 * 4096 * 152064 * 2
    assert rollout.bytes_of("rollout weights") == 2 * shapes.parameters / 8
    token = 2 * 2 * 64 * 1 * 128  # one of 8 groups on each of 8 devices
    assert cached_sequences(run, shapes, rollout) == pytest.approx(rollout.bytes_of("KV cache") / (token * 2048))
    assert host_gib(run, shapes) == 0
    assert checkpoint_gib(run, shapes) == 12 * shapes.parameters / GIB
    offloaded = run_of(80.0, {**json.loads(overrides), **OFFLOADED})
    assert host_gib(offloaded, shapes) == pytest.approx(8 * 12 * share / GIB)
    policy = run_of(80.0, {**json.loads(overrides), f"{ENGINE}.offload_policy": True})
    assert phases(policy, shapes, npu=False)[0].bytes_of("weights") == 0
    assert host_gib(policy, shapes) == pytest.approx(8 * 16 * share / GIB)


@pytest.mark.usefixtures("verls_keys")
def test_the_plan_has_memory_and_time(tmp_path, capsys):
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    model = [f"actor_rollout_ref.model.path={tmp_path}"]
    assert make_plan(file, model).memory == ()
    write_json(tmp_path / "config.json", MODELS["qwen2-7b"][0])
    plan = make_plan(file, model)
    assert [phase.name for phase in plan.memory] == ["training", "rollout"]
    assert {"KV cache", "host memory", "disk", "model"} <= dict(plan.rows).keys()
    assert not any(warning.code.startswith("memory") for warning in plan.warnings)
    small = make_plan(file, [*model, "coca.device_memory_gib=24"])
    assert {"memory-training"} <= {warning.code for warning in small.warnings}
    long = make_plan(
        file, [*model, "data.max_response_length=32768", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40000"]
    )
    assert "context" in {warning.code for warning in long.warnings}
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"timing_s/step": 90.0}, {"timing_s/step": 110.0, "timing_s/testing": 40.0}, {"timing_s/step": 100.0}]
    write_json_lines(metrics, [{"step": step, "data": row} for step, row in enumerate(rows, 1)])
    steps = [*model, "trainer.total_training_steps=100"]  # and three validations
    assert dict(make_plan(file, steps, metrics).rows)["time"].startswith("2.8 hours with 3 validations; 100 s a step")
    assert cli.main(["check", "coca_qwen25_7b", *steps, "--metrics", str(metrics)]) == 0
    assert "2.8 hours" in capsys.readouterr().out
    write_json_lines(metrics, [{"step": 1, "data": {"loss": 1.0}}])
    with pytest.raises(DataError):
        make_plan(file, steps, metrics)


@pytest.mark.usefixtures("verls_keys")
@pytest.mark.parametrize(
    ("gib", "npu", "needed", "codes"),
    [(24, False, 13.5, set()), (61, True, 18.1, set()), (8, False, 13.5, {"memory-training"})],
)
def test_the_small_run_fits_one_device(tmp_path, gib, npu, needed, codes):
    """recipes/verl_qwen3."""
    file = find_verl_run("coca_qwen3_0p6b")
    assert file is not None
    write_json(tmp_path / "config.json", MODELS["qwen3-0.6b"][0])
    device = ["+trainer.device=npu"] if npu else []
    plan = make_plan(file, [f"actor_rollout_ref.model.path={tmp_path}", f"coca.device_memory_gib={gib}", *device])
    assert codes <= {warning.code for warning in plan.warnings if warning.code.startswith("memory")}
    assert bool(codes) == any(warning.code.startswith("memory") for warning in plan.warnings)
    assert (plan.memory[0].gib, plan.memory[0].limit_gib) == pytest.approx((needed, gib), abs=0.1)


@pytest.mark.parametrize("change", [{"model_type": "qwen3_moe"}, {"vocab_size": None}])
def test_another_kind_of_model_is_not_estimated(tmp_path, change):
    config = {**MODELS["qwen2-7b"][0], **change}
    write_json(tmp_path / "config.json", {key: value for key, value in config.items() if value is not None})
    assert read_shapes(tmp_path) is None
