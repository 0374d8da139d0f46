"""Configurations on verl: composed on its defaults, checked and planned; without verl on those that we read."""

import json
import sys

import pytest
import yaml

from coca_mindspeed import cli
from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.config.compose import config_directory, find_verl_run, ready_made_verl_runs
from coca_mindspeed.data.export import verl_row
from coca_mindspeed.errors import ConfigError, MissingDependencyError, UsageError
from coca_mindspeed.utils.json_files import write_json_lines
from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.plan import make_plan, verl_configuration
from coca_mindspeed.verl.settings import VerlSettings, verl_settings
from coca_mindspeed.verl.upstream_keys import unknown_keys
from tests.verl.configurations import record

pytestmark = pytest.mark.usefixtures("verls_keys")

FSDP, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NAMES = [
    *("coca_llama3_8b", "coca_qwen25_1p5b", "coca_qwen25_3b", "coca_qwen25_7b", "coca_qwen25_7b_megatron"),
    *("coca_qwen35_2b", "coca_qwen35_4b", "coca_qwen3_0p6b", "coca_qwen3_1p7b", "coca_qwen3_8b"),
]


def test_the_ready_made_runs():
    assert ready_made_verl_runs() == NAMES
    for name in NAMES:
        file = find_verl_run(name)
        assert file is not None
        config = verl_configuration(file, [])
        settings = verl_settings(config)
        assert verl_problems(config, settings) == []
        assert config["trainer"]["default_local_dir"] == f"runs/{name}/checkpoints"
        bucket = config["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["update_weights_bucket_megabytes"]
        assert bucket * 2**20 > 4 * max(
            152_064 * 3584, 248_320 * 2560
        )  # embeddings of Qwen2.5-7B, Qwen3.5-4B in float32


def test_every_key_of_ours_is_stated_with_its_default():
    """Hydra takes a key that is there without a plus."""
    stated = yaml.safe_load((config_directory() / "verl" / "coca_base.yaml").read_text())["coca"]
    assert stated == VerlSettings().model_dump(mode="json")


def test_a_run_of_another_engine_is_none_of_verls(tmp_path):
    assert find_verl_run("qwen25_7b_910b") is None
    assert find_verl_run(str(tmp_path / "absent.yaml")) is None
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    assert find_verl_run(str(tmp_path / "mine.yaml")) is None
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read"):
        find_verl_run(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("named", ["coca_qwen25_3b", "verl/coca_qwen25_3b", "/verl/coca_qwen25_3b"])
def test_a_file_anywhere_may_stand_on_ours(tmp_path, named):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [{named}, _self_]\ncoca: {{method: {{name: joint}}}}\n")
    assert find_verl_run(str(mine)) == mine
    config = verl_configuration(mine, ["trainer.nnodes=2", "coca.broken_groups=1"])
    assert config["coca"]["method"]["name"] == "joint"
    assert config["actor_rollout_ref"]["model"]["path"] == "models/Qwen2.5-3B-Instruct"
    assert config["trainer"]["nnodes"] == config["reward"]["num_workers"] == 2  # a reward worker on each node
    assert verl_settings(config).broken_groups == 1


def test_a_file_anywhere_may_choose_the_engine(tmp_path):
    mine = tmp_path / "mine.yaml"
    for defaults in (
        "[verl/coca_qwen25_7b_megatron, _self_]",
        "[coca_qwen25_7b, _self_, {override /model_engine: megatron}]",
    ):
        mine.write_text(f"defaults: {defaults}\nactor_rollout_ref: {{actor: {{strategy: megatron}}}}\n")
        assert find_verl_run(str(mine)) == mine
        assert "megatron" in verl_configuration(mine, [])["actor_rollout_ref"]["actor"]


@pytest.mark.parametrize(
    "defaults",
    [
        "[coca_qwen25_7b, 7]",
        "[coca_qwen25_7b, {a: [1]}]",
        "[coca_qwen25_7b, coca_nothing]",
        "[verl/coca_qwen25_7b, verl/nothing]",
        "[coca_qwen25_7b, {override model: x}]",
    ],
)
def test_defaults_that_cannot_be_composed_are_an_error_of_the_file(tmp_path, capsys, defaults):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: {defaults}\n")
    assert cli.main(["check", str(mine)]) == 1
    assert capsys.readouterr().err.startswith(f"coca-mindspeed: {mine}: ")


@pytest.mark.parametrize("override", ["trainer.nnodes", "a.b=[1", "foo=1", "actor_rollout_ref.actor.optim.lrr=1e-5"])
def test_an_override_that_hydra_refuses_is_a_usage_error(override):
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    with pytest.raises(UsageError):
        verl_configuration(file, [override])


def test_without_verl_a_run_is_recognised_and_its_check_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "verl", None)  # its import is blocked
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    with pytest.raises(MissingDependencyError):
        verl_configuration(file, [])
    assert cli.main(["check", "coca_qwen25_7b"]) == 1
    assert "make .venv-verl/.installed" in capsys.readouterr().err


def test_check_prints_the_plan(capsys):
    assert cli.main(["check", "coca_qwen25_7b", "trainer.nnodes=2"]) == 0
    out = capsys.readouterr().out
    assert "16 on 2 nodes" in out
    assert out.count("(MISSING)") == 3
    assert "learning rate" in out
    assert "128 questions x 16 responses = 2048" in out
    assert out.endswith("\nOK\n")
    assert cli.main(["check", "coca_qwen25_7b", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["check", "coca_qwen25_7b", "--write", "x"]) == 2  # an option of the port
    assert "--write" in capsys.readouterr().err


def exported(path, method, count):
    prompt = training_method(method).system_prompt
    write_json_lines(path, [verl_row(record(index), prompt, index) for index in range(count)])
    return path


CORRECTION = "algorithm.rollout_correction"
TINY = {"data.max_response_length": 64, f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 0.1}
UNUSUAL = ["unusual-value"] * 2  # of TINY
LENGTHS = ("trainer.save_freq", "trainer.test_freq", "trainer.total_training_steps")


@pytest.mark.parametrize(
    ("overrides", "length", "validation", "updates", "warned"),
    [
        ({}, "3 steps", "320 responses", "1 of 2", ["no-checkpoint"]),
        ({"trainer.total_epochs": 2, "trainer.test_freq": 2}, "6 steps", "640 responses", "1 of 2", ["no-checkpoint"]),
        ({"data.train_max_samples": 4, "data.val_max_samples": 30}, "2 steps", "60 responses", "1 of 2", []),
        (dict.fromkeys(LENGTHS[:2], -1), "3 steps", "160 responses", "1 of 2", ["no-checkpoint"]),
        ({LENGTHS[1]: -1, "trainer.val_before_train": "false"}, "3 steps", "none", "1 of 2", ["no-checkpoint"]),
        ({LENGTHS[2]: 1}, "1 steps", "320 responses", "1 of 2", ["one-step"]),
        ({f"{FSDP}.ppo_mini_batch_size": 1, **TINY}, "3 steps", "320 responses", "2 of 1", [*UNUSUAL, "no-checkpoint"]),
    ],
)
def test_the_plan_counts_steps_updates_validations_and_checkpoints(
    tmp_path, overrides, length, validation, updates, warned
):
    files = {
        "data.train_files": exported(tmp_path / "train.jsonl", "coca", 7),
        "data.val_files": exported(tmp_path / "val.jsonl", "coca", 160),
    }
    sizes = {"data.train_batch_size": 2, f"{FSDP}.ppo_mini_batch_size": 2}
    run = [f"{key}={value}" for key, value in {**files, **sizes, **overrides}.items()]
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    plan = make_plan(file, run)
    assert plan.problems == ()
    rows = dict(plan.rows)
    assert rows["length"] == length
    assert validation in rows["validation"]
    assert rows["updates a step"].startswith(f"{updates} questions")
    assert [warning.code for warning in plan.warnings if not warning.code.startswith("question")] == warned


@pytest.mark.parametrize(
    ("tokens", "changes", "problems", "warned"),
    [
        (1024, [], [], True),
        (8192, [], [], False),
        (16384, [], [f"{FSDP}.ppo_max_token_len_per_gpu"], False),
        (32768, [f"{FSDP}.ppo_max_token_len_per_gpu=34816"], [], False),
        (8192, [f"++{ROLLOUT}.max_model_len=8192"], [f"{ROLLOUT}.max_model_len"], False),
    ],
)
def test_the_lengths_of_thoughts(tokens, changes, problems, warned):
    file = find_verl_run("coca_qwen3_8b")
    assert file is not None
    thinking = ["coca.method.thinking=true", "data.apply_chat_template_kwargs.enable_thinking=true"]
    plan = make_plan(file, [*thinking, f"data.max_response_length={tokens}", *changes])
    assert [problem.key for problem in plan.problems] == problems
    assert ("short-thoughts" in [warning.code for warning in plan.warnings]) == warned


@pytest.mark.parametrize("method", ["rlcr", "caliber", None])
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_file_for_another_method_or_without_its_prompt_is_refused_before_the_start(tmp_path, capsys, method, key):
    path = exported(tmp_path / "file.jsonl", method or "coca", 128)
    if method is None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_json_lines(path, [{**row, "prompt": row["prompt"][1:]} for row in rows])
    assert cli.main(["check", "coca_qwen25_7b", f"{key}={path}"]) == 1
    assert f"{path}:1" in capsys.readouterr().err
    never = ["trainer.test_freq=-1", "trainer.val_before_train=false"]
    code = cli.main(["check", "coca_qwen25_7b", f"{key}={path}", *never])
    assert code == (key == "data.train_files")  # verl does not ask what it does not evaluate


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train_batch_size=8", "data.train_batch_size"),
        ("data.train_max_samples=3", "data.train_batch_size"),
        ("trainer.total_training_steps=2", "trainer.total_training_steps"),
        ("trainer.total_training_steps=1", None),
    ],
)
def test_a_run_of_more_questions_than_there_are_is_refused(tmp_path, capsys, override, key):
    path = exported(tmp_path / "train.jsonl", "coca", 7)
    sizes = ["data.train_batch_size=4", f"{FSDP}.ppo_mini_batch_size=4", f"data.train_files={path}"]
    assert cli.main(["check", "coca_qwen25_7b", *sizes, override]) == bool(key)
    assert (key or "one-step") in capsys.readouterr().err


def test_check_counts_the_problems(capsys):
    typed = ["algorithm.use_kl_in_reward=true", "coca.method.name=sequential"]
    assert cli.main(["check", "coca_qwen25_7b", *typed]) == 1
    found = capsys.readouterr().err
    assert typed[0] in found
    assert "trainer.total_epochs=1" in found
    assert found.endswith("\n2 problems\n")


FREE = """
  rollout: {engine_kwargs: {vllm: {x: 1}}}
  actor: {megatron: {override_transformer_config: {x: 1}}}"""
UNKNOWN = """
  actor: {optim: {lrr: 1e-5}}
actor_rollout_reff: {actor: {optim: {lr: 1e-5}}}
foo: 1"""


@pytest.mark.parametrize(
    ("content", "keys"),
    [(FREE, []), (UNKNOWN, ["actor_rollout_ref.actor.optim.lrr", "actor_rollout_reff", "foo"])],
)
def test_keys_of_a_file_that_verl_does_not_know_are_refused(content, keys, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [coca_qwen25_7b_megatron, _self_]\nactor_rollout_ref:{content}\n")
    overrides = ["+bar=1", "+data.bar.x=1", "data.shuffle=false"]
    found = unknown_keys(verl_configuration(mine, overrides), overrides)
    assert sorted((problem.code, problem.key) for problem in found) == [("unknown-key", key) for key in keys]


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        (f"+{ROLLOUT}.gpu_memory_utilisation=0.5", f"{ROLLOUT}.gpu_memory_utilisation", "gpu_memory_utilization"),
        (f"+{FSDP}.lr=1e-5", f"{FSDP}.lr", f"{FSDP}.optim.lr"),
        (f"++{FSDP}.fsdp_config.mixed_precison=1", f"{FSDP}.fsdp_config.mixed_precison", ""),
        (f"+{FSDP}.megatron.tensor_model_parallel_size=2", f"{FSDP}.megatron", ""),  # of the other engine
        (f"+{FSDP}.policy_loss.loss_mod=x", f"{FSDP}.policy_loss.loss_mod", f"{FSDP}.policy_loss.loss_mode"),
        (f"+{FSDP}.fsdp_config.mixed_precision.param_dtype=fp32", "", ""),  # a field that verl's YAML lacks
        (f"+{ROLLOUT}.engine_kwargs.vllm.x=1", "", ""),
        ("+data.bar=1", "", ""),  # not a dataclass
    ],
)
def test_a_key_that_verls_dataclass_lacks_is_refused_although_it_was_added(override, key, near):
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    plan = make_plan(file, [override])
    assert [(problem.code, problem.key) for problem in plan.problems] == ([("unknown-key", key)] if key else [])
    assert all(near in problem.expected for problem in plan.problems)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        (f"{FSDP}.lr=1e-5", f"{FSDP}.optim.lr"),
        (f"{FSDP}.optim.lrr=1e-5", f"{FSDP}.optim.lr"),
        ("trainer.test_frq=5", "trainer.test_freq"),
        ("coca.method.nam=joint", "coca.method.name"),
        ("train_batch_size=8", "data.train_batch_size"),
    ],
)
def test_an_unknown_override_is_told_the_nearest_key_and_not_to_add_it(override, near):
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    with pytest.raises(UsageError) as caught:
        verl_configuration(file, ["trainer.nnodes=2", override])
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        ("unknown-key", override.split("=")[0])
    ]
    assert repr(near) in str(caught.value)
    assert f"+{override}" not in str(caught.value)


def test_a_value_that_verls_dataclass_refuses_is_a_problem_of_its_section():
    file = find_verl_run("coca_qwen25_7b_megatron")
    assert file is not None
    plan = make_plan(file, [f"{ROLLOUT}.mode=sync"])
    assert [(problem.code, problem.key) for problem in plan.problems] == [("verls-class", ROLLOUT)]
    assert "has been removed" in plan.problems[0].expected


def test_the_strategy_alone_does_not_choose_the_engine(capsys):
    assert cli.main(["check", "coca_qwen25_7b", f"{FSDP}.strategy=megatron"]) == 1
    refused = capsys.readouterr().err
    assert "[engine]" in refused
    assert "coca_qwen25_7b_megatron" in refused
    assert refused.endswith("\n1 problem\n")


def test_a_configuration_without_the_section_is_told_how_to_write_one():
    for config in ({}, {"coca": None}, {"coca": "coca"}):
        with pytest.raises(ConfigError, match=r"^coca: .*coca\.method\.name=coca"):
            verl_settings(config)
    with pytest.raises(ConfigError, match=r"^coca\.broken_groups=-1"):
        verl_settings({"coca": {"broken_groups": -1}})
    assert verl_settings({"coca": {}}).method.name == "coca"


def test_the_stages_of_a_method_share_a_run_equally():
    sequential = VerlSettings.model_validate({"method": {"name": "sequential"}})
    assert [sequential.stage(step, 6) for step in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert [VerlSettings().stage(step, 3) for step in (1, 2, 3)] == [0, 0, 0]
    assert sequential.stage(7, 6) == 1, "a step beyond the last stays in the last stage"
