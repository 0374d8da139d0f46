"""YAML files in MindSpeed-RL's own layout: they run as files of ours do."""

import json
import os
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, write_run_file
from coca_mindspeed.mindspeed.upstream_layout import compose_any_layout
from tests.mindspeed.builders import write
from tests.mindspeed.test_patch_export import CHECKOUTS
from tests.tables import read_table

SHAPE = """
qwen25_7b: {use_mcore_models: true, num_layers: 28, hidden_size: 3584, ffn_hidden_size: 18944, num_attention_heads: 28,
  rotary_base: 1000000, max_position_embeddings: 32768, padded_vocab_size: 152064, make_vocab_size_divisible_by: 1,
  untie_embeddings_and_output_weights: true, add_qkv_bias: true, group_query_attention: true, num_query_groups: 4}
"""
FILE = """
defaults:
  - model: [qwen25_7b]
megatron_training:
  model: qwen25_7b
  stage: ray_grpo
  tokenizer_name_or_path: ./Qwen2.5-7B
  data_path: ./train.jsonl
  dataset_additional_keys: [labels]
  global_batch_size: 32
  seq_length: 2048
  save_interval: 100
  train_iters: 500
  seed: 3
  bf16: true
  use_distributed_optimizer: true
  sequence_parallel: true
actor_config:
  model: qwen25_7b
  micro_batch_size: 1
  tensor_model_parallel_size: 4
  lr: 2e-6
  weight_decay: 0.01
  lr_warmup_fraction: 0.0
  adam_beta2: 0.98
  load: ./weights
  save: ./ckpt
rl_config:
  gamma: 1.0
  lam: 0.95
  adv_estimator: group_norm
  kl_penalty: low_var_kl
  init_kl_coef: 0.0
  mini_batch_size: 16
  max_prompt_length: 2048
  n_samples_per_prompt: 8
  verifier_function: [math_17k_acc]
  actor_resource: {num_npus: 16}
generate_config:
  offload_train_optimizer: true
  offload_train_grad: true
  offload_train_param: true
  infer_tensor_parallel_size: 1
  max_num_seqs: 64
  max_model_len: 4096
  max_num_batched_tokens: 8192
  gpu_memory_utilization: 0.6
  sampling_config: {max_tokens: 2048, top_p: 1.0, top_k: -1}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    write(tmp_path / "model" / "qwen25_7b.yaml", SHAPE)
    return write(tmp_path / "grpo.yaml", FILE)


def written(composed, output):
    return mindspeed_values(composed.run, make_plan(composed.run).iterations, StageFiles(output))


def test_values_move_to_our_keys(file, tmp_path):
    composed = compose_any_layout(str(file))
    run = composed.run
    assert make_plan(run).problems == ()
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.weight_decay) == (2e-6, (0.9, 0.98), 0.01)
    assert (run.rollout.prompts, run.rollout.group_size, run.trainer.minibatches) == (32, 8, 2)
    assert (run.trainer.steps, run.optimizer.warmup_steps, run.checkpoint.interval, run.seed) == (500, 0, 100, 2)
    assert (run.model.path, run.model.megatron_path, run.data.train) == ("./Qwen2.5-7B", "./weights", "./train.jsonl")
    assert (run.hardware.platform, run.hardware.nodes, run.hardware.npus_per_node) == ("npu", 1, 16)
    values = written(composed, tmp_path / "out")
    assert values["megatron_training"]["seq_length"] == 4096
    assert values["megatron_training"]["dataset_additional_keys"] == ["coca_record"]
    assert values["actor_config"]["save"] == str(tmp_path / "out/stage0/checkpoints")
    assert values["rl_config"]["verifier_function"] == ["math_17k_acc"]
    assert not {"gamma", "lam", "adv_estimator", "kl_penalty"} & set(values["rl_config"])
    ignored = next(note for note in composed.notes if note.startswith("ignored"))
    assert {"rl_config.gamma=1.0", "rl_config.kl_penalty=low_var_kl"} <= set(ignored.replace(",", "").split())


@pytest.mark.parametrize(("override", "key", "value"), read_table(__file__, "upstream_overrides.tsv"))
def test_overrides_name_our_keys_or_upstreams(file, tmp_path, override, key, value):
    composed = compose_any_layout(str(file), override.split())
    assert make_plan(composed.run).problems == ()
    content = written(composed, tmp_path)
    for part in key.split("."):
        content = content[part]
    assert content == json.loads(value)


@pytest.mark.parametrize(("overrides", "problems"), read_table(__file__, "refused_upstream_overrides.tsv"))
def test_refused_overrides(file, overrides, problems):
    try:
        found = make_plan(compose_any_layout(str(file), overrides.split()).run).problems
    except ConfigError as error:
        found = error.problems
    assert " ".join(f"{p.code} {p.key.removeprefix('mindspeed_rl.')}" for p in found) == problems


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("low_var_kl", "foo", "hook-algorithm"),
        ("stage: ray_grpo", "stage: ray_dapo", "hook-stage"),
        ("seed: 3", "seed: x", "set-twice"),
        ("lr_warmup_fraction: 0.0", "lr_warmup_fraction: some", "set-twice"),
        ("mini_batch_size: 16", "mini_batch_sizes: 16", "unknown-key"),
        ("actor_resource:", "use_kl_in_reward: true\n  actor_resource:", "hook-algorithm"),
    ],
)
def test_a_file_that_asks_for_something_else_is_refused(file, old, new, code):
    file.write_text(FILE.replace(old, new))
    assert code in [problem.code for problem in make_plan(compose_any_layout(str(file)).run).problems]


GROUPS = "[base, {override /model: qwen25_7b}, {override /hardware: ascend_910b}, {override /data: big_math}, _self_]"


@pytest.mark.parametrize("defaults", ["[qwen25_7b_910b, _self_]", "[mine, _self_]", GROUPS])
def test_pasted_sections_are_named_with_their_place(tmp_path, monkeypatch, defaults):
    """In a file that stands on a run of ours, itself or by another file."""
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    write(tmp_path / "mine.yaml", "defaults: [qwen25_7b_910b, _self_]\n")
    actor, rl = "{lr: 1e-6, micro_batch_size: 2}", "{n_samples_per_prompt: 8, mini_batch_size: 64}"
    file = write(tmp_path / "pasted.yaml", f"defaults: {defaults}\nactor_config: {actor}\nrl_config: {rl}\n")
    with pytest.raises(ConfigError) as caught:
        compose_any_layout(str(file))
    found = {problem.key: problem.expected for problem in caught.value.problems}
    assert "mindspeed_rl.actor_config" in found["actor_config"]
    assert "rollout.group_size and trainer.minibatches" in found["rl_config"]


def test_files_that_name_each_other_are_no_files_of_ours(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        write(tmp_path / f"{name}.yaml", f"defaults: [{other}, _self_]\nactor_config: {{lr: 1e-6}}\n")
    with pytest.raises(ConfigError, match=r"one\.yaml"):
        compose_any_layout(str(tmp_path / "one.yaml"))


def test_errors_name_the_file(file, tmp_path):
    for old, new, ours in (("lr: 2e-6", "lr: fast", "optimizer.lr"), ("_iters: 500", "_iters: many", "trainer.steps")):
        file.write_text(FILE.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            compose_any_layout(str(file))
        assert str(caught.value).startswith(f"{file}: {ours}={new.split()[-1]!r}")
    elsewhere = write(tmp_path / "elsewhere" / "grpo.yaml", FILE)  # without the group model/ beside it
    with pytest.raises(ConfigError, match="MINDSPEED_RL_HOME"):
        compose_any_layout(str(elsewhere))


@pytest.mark.parametrize("name", ["qwen25_7b_910b", "qwen3_8b_910c", "llama3_8b_910b"])
def test_the_file_that_check_writes_is_such_a_file(name, tmp_path):
    """Read again, it means the same."""
    first = mindspeed_values((run := compose_run(name).run), make_plan(run).iterations, StageFiles(tmp_path))
    write_run_file(tmp_path / "run.yaml", first, name)
    assert written(compose_any_layout(str(tmp_path / "run.yaml")), tmp_path) == first


def test_check_and_config_take_it(file, tmp_path, capsys):
    target = tmp_path / "out.yaml"
    assert main(["check", str(file), "--write", str(target)]) == 0
    assert "rl_config.gamma=1.0" in capsys.readouterr().out
    assert yaml.safe_load(target.read_text())["actor_config"]["lr"] == 2e-6
    assert main(["config", "get", str(file), "hardware.npus_per_node"]) == 0
    assert capsys.readouterr().out == "16\n"


@pytest.mark.parametrize(
    ("name", "npus", "typed", "memory", "nodes"),
    [
        ("grpo_qwen25_7b_A3", 16, "", 61.27, 1),
        ("grpo_qwen25_7b_A3", 8, "", 61.27, 1),
        ("grpo_qwen25_7b_a2", 16, "", 60.96, 2),
        ("grpo_qwen3_30b_a3b", 8, "", 60.96, 1),  # no Atlas A3: three billion active parameters
        ("grpo", 8, "", 60.96, 1),
        ("grpo", 32, "", 61.27, 2),
        ("grpo_A3", 16, "hardware=ascend_910b", 60.96, 2),
        ("grpo_A2", 8, "hardware=ascend_910c", 61.27, 1),
    ],
)
def test_the_machine_is_typed_or_that_of_the_name_or_of_the_npus(file, name, npus, typed, memory, nodes):
    other = write(file.with_name(f"{name}.yaml"), FILE.replace("num_npus: 16", f"num_npus: {npus}"))
    run = compose_any_layout(str(other), typed.split()).run
    hardware = run.hardware
    assert (hardware.memory_gib, hardware.nodes, hardware.npus_per_node) == (memory, nodes, npus // nodes)
    assert "use_dynamic_bsz" not in run.mindspeed_rl["rl_config"], "the keys of ready-made runs are not added"


@pytest.mark.parametrize("key", ["coca.platform", "hardware.platform"])
def test_the_cpu_shim_needs_no_megatron_weights(file, key):
    file.write_text(FILE.replace("  load: ./weights\n", ""))
    assert make_plan(compose_any_layout(str(file), [f"{key}=host"]).run).problems == ()


def test_hardware_chooses_a_machine_with_npus(file):
    with pytest.raises(UsageError, match=r"coca\.platform=host"):  # what to type instead
        compose_any_layout(str(file), ["hardware=host"])


SEED = "generate_config.sampling_config.seed=null"
# Name -> what has to be changed besides the data, and the code of the problem that is left.
GRPO = {
    **dict.fromkeys(
        (
            *("grpo_deepseek_r1_671b_A2", "grpo_deepseek_r1_671b_A3", "grpo_deepseek_r1_671b_A3_eplb"),
            "grpo_qwen3_235b_a22b_A2",
        ),
        ([], ["mixture-of-experts"]),
    ),
    "grpo_qwen25_32b_A2": ([SEED], []),
    "grpo_qwen25_32b_A3": ([SEED, "actor_config.micro_batch_size=1"], []),
    "grpo_qwen25_7b_A3": ([], []),
    "grpo_qwen3_8b_A3": ([], []),
}


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
@pytest.mark.parametrize("name", GRPO)
def test_mindspeed_rls_own_files(release, name, monkeypatch):
    home = os.environ.get(CHECKOUTS[release])
    if not home:
        pytest.skip(f"needs {CHECKOUTS[release]} (docs/port.md)")
    monkeypatch.setenv("MINDSPEED_RL_HOME", home)
    overrides, expected = GRPO[name]
    file = str(Path(home) / "configs" / f"{name}.yaml")
    composed = compose_any_layout(file, ["data.train=train.jsonl", *overrides])
    try:
        codes = [problem.code for problem in make_plan(composed.run).problems]
    except ConfigError as error:
        codes = [problem.code for problem in error.problems]
    assert codes == expected
