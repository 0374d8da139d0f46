"""YAML files in MindSpeed-RL's own layout: they are converted into files of ours, which run."""

import json
import os
import shlex
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed import conversion
from coca_mindspeed.mindspeed.keys import put
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, write_run_file
from coca_mindspeed.mindspeed.upstream_layout import convert
from coca_mindspeed.utils.text_formats import value_of
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


def converted(file, overrides=(), **options):
    """The run of the converted file."""
    text, _ = convert(file, **options)
    return compose_run(str(write(file.parent / "converted" / file.name, text)), overrides).run


def change(file, changes):
    """Set ``KEY=VALUE ...`` in the file."""
    content = yaml.safe_load(file.read_text())
    for key, _, value in (each.partition("=") for each in changes.split()):
        put(content, key, yaml.safe_load(value))
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def written(run, output):
    return mindspeed_values(run, make_plan(run).iterations, StageFiles(output))


def test_values_move_to_our_keys(file, tmp_path):
    run = converted(file)
    assert make_plan(run).problems == ()
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.weight_decay) == (2e-6, (0.9, 0.98), 0.01)
    assert (run.rollout.prompts, run.rollout.group_size, run.trainer.minibatches) == (32, 8, 2)
    assert (run.trainer.steps, run.optimizer.warmup_steps, run.checkpoint.interval, run.seed) == (500, 0, 100, 2)
    assert (run.model.path, run.model.megatron_path, run.data.train) == ("./Qwen2.5-7B", "./weights", "./train.jsonl")
    assert (run.hardware.platform, run.hardware.nodes, run.hardware.npus_per_node) == ("npu", 1, 16)
    values = written(run, tmp_path / "out")
    assert values["megatron_training"]["seq_length"] == 4096
    assert values["megatron_training"]["dataset_additional_keys"] == ["coca_record"]
    assert values["actor_config"]["save"] == str(tmp_path / "out/stage0/checkpoints")
    assert values["rl_config"]["verifier_function"] == ["math_17k_acc"]
    assert not {"gamma", "lam", "adv_estimator", "kl_penalty"} & set(values["rl_config"])
    assert "use_dynamic_bsz" not in values["rl_config"], "the keys of ready-made runs are not added"


def test_notes_name_keys_that_are_ignored_or_replaced(file):
    text, [ignored, replaced] = convert(file)
    assert {"rl_config.gamma=1.0", "rl_config.kl_penalty='low_var_kl'"} <= set(ignored.replace(",", "").split())
    assert "actor_config.save='./ckpt' by --output" in replaced
    assert text.splitlines()[1:3] == [f"# {ignored}", f"# {replaced}"]


@pytest.mark.parametrize(("changes", "key", "value"), read_table(__file__, "upstream_changes.tsv"))
def test_a_value_is_the_same_in_the_file_that_is_run(file, tmp_path, changes, key, value):
    change(file, changes)
    run = converted(file)
    assert make_plan(run).problems == ()
    assert value_of(written(run, tmp_path), key) == json.loads(value)


@pytest.mark.parametrize(("changes", "problems"), read_table(__file__, "refused_upstream_changes.tsv"))
def test_values_that_no_file_of_ours_can_hold(file, changes, problems):
    change(file, changes)
    with pytest.raises(ConfigError) as caught:
        convert(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert " ".join(f"{problem.code} {problem.key}" for problem in caught.value.problems) == problems


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("low_var_kl", "foo", "hook-algorithm rl_config.kl_penalty"),
        ("stage: ray_grpo", "stage: ray_dapo", "hook-stage megatron_training.stage"),
        ("gamma: 1.0", "gamma: 0.9", "hook-algorithm rl_config.gamma"),
        ("lam: 0.95", "lam: 0.5\n  use_kl_in_reward: true", "hook-algorithm rl_config.use_kl_in_reward"),
    ],
)
def test_a_file_that_asks_for_another_algorithm_is_refused_by_its_plan(file, old, new, problem):
    file.write_text(FILE.replace(old, new))
    code, key = problem.split()
    assert (code, f"mindspeed_rl.{key}") in [each[:2] for each in make_plan(converted(file)).problems]


GROUPS = "[base, {override /model: qwen25_7b}, {override /hardware: ascend_910b}, {override /data: big_math}, _self_]"


@pytest.mark.parametrize("defaults", ["[qwen25_7b_910b, _self_]", "[mine, _self_]", GROUPS])
def test_pasted_sections_are_named_with_their_place(tmp_path, capsys, defaults):
    """In a file that stands on a run of ours, itself or by another file."""
    write(tmp_path / "mine.yaml", "defaults: [qwen25_7b_910b, _self_]\n")
    actor, rl = "{lr: 1e-6, micro_batch_size: 2}", "{n_samples_per_prompt: 8, mini_batch_size: 64}"
    file = write(tmp_path / "pasted.yaml", f"defaults: {defaults}\nactor_config: {actor}\nrl_config: {rl}\n")
    assert main(["config", "show", str(file)]) == 1
    shown = capsys.readouterr().err
    assert "mindspeed_rl.actor_config" in shown
    assert "rollout.group_size and trainer.minibatches" in shown
    assert main(["config", "convert", str(file)]) == 2


def test_files_that_name_each_other(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        write(tmp_path / f"{name}.yaml", f"defaults: [{other}, _self_]\nactor_config: {{lr: 1e-6}}\n")
    for read in (convert, lambda file: compose_run(str(file))):
        with pytest.raises(ConfigError, match=r"one\.yaml"):
            read(tmp_path / "one.yaml")


def test_files_that_cannot_be_composed(file, tmp_path):
    elsewhere = write(tmp_path / "elsewhere" / "grpo.yaml", FILE)  # without the group model/ beside it
    with pytest.raises(ConfigError, match="MINDSPEED_RL_HOME"):
        convert(elsewhere)
    file.write_text(FILE.replace("lr: 2e-6", "lr: ${nothing}"))
    with pytest.raises(ConfigError, match=r"grpo\.yaml: cannot be composed.*nothing"):
        convert(file)


@pytest.mark.parametrize("name", ["qwen25_7b_910b", "qwen3_8b_910c", "llama3_8b_910b"])
def test_the_file_that_check_writes_is_such_a_file(name, tmp_path):
    """Converted, it means the same."""
    first = mindspeed_values((run := compose_run(name).run), make_plan(run).iterations, StageFiles(tmp_path))
    write_run_file(tmp_path / "run.yaml", first, name)
    assert written(converted(tmp_path / "run.yaml"), tmp_path) == first


def test_the_command_writes_a_new_file(file, tmp_path, capsys):
    target = tmp_path / "mine.yaml"
    assert main(["config", "convert", str(file)]) == 0
    text = capsys.readouterr().out
    command = ["config", "convert", str(file), "--output"]
    assert main([*command, str(target)]) == 0
    assert target.read_text() == text
    assert "rl_config.gamma=1.0" in capsys.readouterr().out
    for other in (target, tmp_path / "absent" / "mine.yaml", tmp_path / "mine.txt"):
        before = sorted(tmp_path.rglob("*"))
        assert main([*command, str(other)]) == 2
        assert sorted(tmp_path.rglob("*")) == before
    assert main(["config", "get", str(target), "hardware.npus_per_node"]) == 0
    assert capsys.readouterr().out == "16\n"


@pytest.mark.parametrize(
    "command", ["check", "config show", "config get", "doctor", "train", "launch", "convert_weights"]
)
def test_commands_refuse_the_layout_and_print_the_conversion(command, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    named = file.rename(tmp_path / "my grpo.yaml")
    more = {"config get": ["seed"], "train": ["--output", "run"]}.get(command, [])
    if command == "convert_weights":
        code = conversion.main(["hf2mcore", str(named), "--dry-run"])
    else:
        code = main([*command.split(), str(named), *more])
    assert code == 1
    [convert] = [line for line in capsys.readouterr().err.splitlines() if "config convert" in line]
    _, *arguments = shlex.split(convert)
    assert main(arguments) == 0
    assert compose_run("coca_my grpo.yaml").run.optimizer.lr == 2e-6


@pytest.mark.parametrize(
    ("name", "npus", "hardware", "memory", "nodes"),
    [
        ("grpo_qwen25_7b_A3", 16, None, 61.27, 1),
        ("grpo_qwen25_7b_A3", 8, None, 61.27, 1),
        ("grpo_qwen25_7b_a2", 16, None, 60.96, 2),
        ("grpo_qwen3_30b_a3b", 8, None, 60.96, 1),  # no Atlas A3: three billion active parameters
        ("grpo", 8, None, 60.96, 1),
        ("grpo", 32, None, 61.27, 2),
        ("grpo_A3", 16, "ascend_910b", 60.96, 2),
        ("grpo_A2", 8, "ascend_910c", 61.27, 1),
    ],
)
def test_the_machine_is_typed_or_that_of_the_name_or_of_the_npus(file, name, npus, hardware, memory, nodes):
    other = write(file.with_name(f"{name}.yaml"), FILE.replace("num_npus: 16", f"num_npus: {npus}"))
    found = converted(other, hardware=hardware).hardware
    assert (found.memory_gib, found.nodes, found.npus_per_node) == (memory, nodes, npus // nodes)


def test_the_cpu_shim_needs_no_megatron_weights(file):
    file.write_text(FILE.replace("  load: ./weights\n", ""))
    assert make_plan(converted(file, ["hardware.platform=host"])).problems == ()
    change(file, "coca.platform=host")
    assert make_plan(converted(file)).problems == ()


# Name -> overrides of the converted file besides the data, and the code of the problem that is left.
SEED = "mindspeed_rl.generate_config.sampling_config.seed=null"
GRPO = {
    **dict.fromkeys(
        ("grpo_deepseek_r1_671b_A2", "grpo_deepseek_r1_671b_A3", "grpo_deepseek_r1_671b_A3_eplb"),
        ([], "literal_error"),  # RoPE by YaRN
    ),
    "grpo_qwen3_235b_a22b_A2": ([], "mixture-of-experts"),
    "grpo_qwen25_32b_A2": ([SEED], None),
    "grpo_qwen25_32b_A3": ([SEED, "mindspeed_rl.actor_config.micro_batch_size=1"], None),
    "grpo_qwen25_7b_A3": ([], None),
    "grpo_qwen3_8b_A3": ([], None),
}


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
@pytest.mark.parametrize("name", GRPO)
def test_mindspeed_rls_own_files(release, name, monkeypatch, tmp_path):
    home = os.environ.get(CHECKOUTS[release])
    if not home:
        pytest.skip(f"needs {CHECKOUTS[release]} (docs/port.md)")
    monkeypatch.setenv("MINDSPEED_RL_HOME", home)
    overrides, expected = GRPO[name]
    try:
        text, _ = convert(Path(home) / "configs" / f"{name}.yaml")
        file = write(tmp_path / f"{name}.yaml", text)
        problems = make_plan(compose_run(str(file), ["data.train=train.jsonl", *overrides]).run).problems
    except ConfigError as error:
        problems = error.problems
    assert [problem.code for problem in problems[:1]] == ([expected] if expected else [])
