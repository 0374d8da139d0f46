"""Composition and validation: what users write, and what they are told when they get it wrong."""

from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.cli.config import reference_markdown
from coca_mindspeed.config.checks import with_steps
from coca_mindspeed.config.compose import compose_run, named_defaults, ready_made_runs
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[2]


def test_groups_run_file_and_overrides_in_this_order():
    run = compose_run("demo").run
    assert run.method.name == "coca"
    assert run.rollout.prompts == 64
    assert run.method.clip == 0.2  # a default of the schema that no YAML mentions
    changed = compose_run("demo", ["method=joint", "rollout.prompts=32", "method.clip=0.3", "seed=7"]).run
    assert changed.method.name == "joint"
    assert changed.method.confidence_decimals == 2  # the run file still applies on top of the group
    assert (changed.rollout.prompts, changed.method.clip, changed.seed) == (32, 0.3, 7)
    passed = compose_run("demo", ["mindspeed_rl.actor_config.tensor_model_parallel_size=4"]).run
    assert passed.mindspeed_rl == {"actor_config": {"tensor_model_parallel_size": 4}}


def test_the_resolved_yaml_composes_to_itself(tmp_path):
    composed = compose_run("demo", ["optimizer.betas=[0.8,0.9]"])
    (tmp_path / "again.yaml").write_text(composed.to_yaml())
    assert compose_run(str(tmp_path / "again.yaml")).run == composed.run


def test_a_file_of_ones_own_may_build_on_ours(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - demo\n  - override method: rlvr\n  - _self_\nrollout:\n  group_size: 4\n")
    run = compose_run(str(mine)).run
    assert (run.method.name, run.rollout.group_size, run.rollout.prompts) == ("rlvr", 4, 64)


@pytest.mark.parametrize("choice", ["parallel: tp2pp2", "method: rlvr"])
def test_a_group_as_a_plain_key_is_refused_with_the_line_to_write(choice, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults:\n  - qwen25_7b_910b\n  - _self_\n{choice}\n")
    with pytest.raises(ConfigError) as caught:
        compose_run(str(mine))
    assert f"`- override {choice}`" in caught.value.problems[0].expected
    mine.write_text(f"defaults:\n  - qwen25_7b_910b\n  - override {choice}\n  - _self_\n")
    compose_run(str(mine))


# Those for Ascend are planned in tests/mindspeed/test_plan.py.
@pytest.mark.parametrize("name", [n for n in ready_made_runs() if n not in ("local", "laptop") and "_910" not in n])
def test_every_ready_made_run_is_valid(name):
    assert isinstance(compose_run(name).run, RunConfig)


def test_names_that_are_equally_near_are_both_suggested():
    with pytest.raises(UsageError, match=r"'qwen25_7b_910b'.*'qwen25_7b_910c'|'qwen25_7b_910c'.*'qwen25_7b_910b'"):
        compose_run("qwen25_7b_910")


def test_a_default_without_a_file_is_named_with_the_nearest_run(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [demo_, _self_]\n")
    with pytest.raises(ConfigError, match=r"'demo_'.*'demo'"):
        compose_run(str(mine))
    (tmp_path / "demo_.yaml").write_text("defaults: [demo, _self_]\n")
    assert compose_run(str(mine)).run == compose_run("demo").run


def test_a_misspelt_key_is_named_before_the_value_that_it_leaves_missing():
    given = ["model.path=x", "data.train=t.jsonl", "data.evaluate=e.jsonl"]
    with pytest.raises(UsageError) as caught:
        compose_run("laptop", [*given, "warmup.records=t.jsonl"])
    assert [problem.key for problem in caught.value.problems] == ["warmup"]
    with pytest.raises(UsageError, match=r"warm_up\.records"):
        compose_run("laptop", given)


@pytest.mark.parametrize(("typed", "key"), [("model=/models/x", "model.path"), ("data=data/x.jsonl", "data.train")])
def test_a_path_for_a_group_is_told_its_key(typed, key):
    with pytest.raises(UsageError, match=rf"write {key}={typed.partition('=')[2]}"):
        compose_run("demo", [typed])


def test_local_needs_a_model_and_data():
    with pytest.raises(ConfigError, match=r"local\.yaml: model\.path=\?\?\?: "):
        compose_run("local")
    assert compose_run("local", ["model.path=m", "data.train=t.jsonl"]).run.data.name == "records"
    with pytest.raises(ConfigError, match=r"data\.train=null: "):
        compose_run("demo", ["data.name=records"])


def test_a_key_that_others_are_computed_from_is_refused_itself():
    """MindSpeed-RL's max_num_seqs is computed from it."""
    with pytest.raises(UsageError) as caught:
        compose_run("qwen25_7b_910b", ["rollout.prompts=abc"])
    assert [problem.key for problem in caught.value.problems] == ["rollout.prompts"]


def test_mistakes_in_a_file_name_the_file(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - demo\n  - _self_\nrollout:\n  group_sise: 4\noptimizer:\n  lr: fast\n")
    with pytest.raises(ConfigError) as caught:
        compose_run(str(mine))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2  # all mistakes at once
    assert all(line.startswith(f"{mine}: ") for line in lines)
    assert "did you mean 'group_size'?" in lines[0]
    assert "optimizer.lr='fast': input should be a valid number" in lines[1]


@pytest.mark.parametrize(
    "files",
    [
        {"mine": "defaults: [mine, _self_]"},
        {"mine": "defaults: [other, _self_]", "other": "defaults: [mine, _self_]"},
        {
            "mine": "defaults: [{model: own}, _self_]",
            "model/own": "defaults: [again]",
            "model/again": "defaults: [own]",
        },
        {"mine": "defaults: [base]", "base": "defaults: [demo, _self_]"},  # the ready-made demo names base
        {"mine": "defaults: [other]\nactor_config: {lr: 1}", "other": "defaults: [mine]"},
    ],
    ids=["itself", "two", "a group", "a ready-made run", "MindSpeed-RL's layout"],
)
@pytest.mark.parametrize("command", [("config", "show"), ("check",)], ids=" ".join)
def test_files_that_name_each_other_are_refused(command, files, tmp_path, capsys):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"{text}\n")
    assert main([*command, str(tmp_path / "mine.yaml")]) == 1
    error = capsys.readouterr().err
    assert " -> " in error
    assert "Traceback" not in error


def test_a_file_may_be_reached_by_two_ways(tmp_path):
    for name, defaults in (("mine", "left, right"), ("left", "demo"), ("right", "{optional method: rlvr}")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: [{defaults}, _self_]\n")
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "rlvr.yaml").write_text("name: rlvr\n")
    assert set(named_defaults("mine", [tmp_path])) == {"left", "right", "demo", "method/rlvr"}


def test_a_list_is_no_configuration(tmp_path):
    (tmp_path / "bad.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        compose_run(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(("name", "named"), [("dmo", "'demo'"), ("nowhere.yaml", "nowhere"), ("mine.yml", r"\.yaml")])
def test_names_that_are_no_run(tmp_path, monkeypatch, name, named):
    monkeypatch.chdir(tmp_path)
    Path("mine.yml").write_text("defaults: [demo, _self_]\n")
    with pytest.raises(UsageError, match=named):
        compose_run(name)


def test_the_reference_page_is_made_from_the_schema():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert reference_markdown() in page, "docs/configuration.md lags behind: make docs"


@pytest.mark.parametrize(
    ("section", "key"), [("coca", "coca.rollout_is_threshold"), ("verl", "coca.broken_groups"), ("run", "model.path")]
)
def test_keys_of_every_engine_are_listed(section, key, capsys):
    assert main(["config", "keys", section]) == 0
    assert f"`{key}`" in capsys.readouterr().out


def test_epochs_decide_where_they_are_given():
    run = compose_run("demo", ["data.epochs=0.5"]).run
    assert with_steps(run, 50_000).trainer.steps == 390  # 25,000 questions, 64 a step, what is left over is not used
    assert with_steps(run, 50_000).rollout == run.rollout
    plain = compose_run("demo").run
    assert with_steps(plain, 50_000) is plain
    with pytest.raises(ConfigError) as caught:
        with_steps(run, 100)
    assert [problem[:3] for problem in caught.value.problems] == [("no-whole-step", "data.epochs", 0.5)]


@pytest.mark.parametrize(
    ("text", "overrides", "refused"),
    [
        ("defaults: [demo, _self_]\ntrainer: {steps: 5}", ["data.epochs=0.5"], False),
        ("defaults: [demo, _self_]\ntrainer: {steps: 5}\ndata: {epochs: 1}", [], False),  # as a run's config.yaml
        ("defaults: [demo, _self_]\ndata: {epochs: 1}", ["trainer.steps=5"], True),
        ("defaults: [demo, _self_]\ndata: {epochs: 1}", ["trainer.steps=5", "data.epochs=null"], False),
        ("defaults: [qwen25_7b_910b, _self_]\ntrainer: {steps: 5}", [], True),
        ("defaults: [qwen25_7b_910b, _self_]\ntrainer: {steps: 5}\ndata: {epochs: null}", [], False),
    ],
)
def test_steps_that_epochs_overrule_are_refused(text, overrides, refused, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    if refused:
        with pytest.raises(ConfigError) as caught:
            compose_run(str(file), overrides)
        assert [(problem.code, problem.key) for problem in caught.value.problems] == [("no-effect", "trainer.steps")]
    else:
        compose_run(str(file), overrides)
