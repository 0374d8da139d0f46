"""Overrides in Hydra's grammar; a mistake is reported with the override."""

import functools
import operator

import pytest

from coca_mindspeed.config.compose import MAPPING_KEYS, PATH_KEYS, compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, UsageError
from tests.tables import EVERY, check_rows, read_table


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        *(("models/a-b.c", "models/a-b.c"), ("a b", "a b"), ("'a b'", "a b"), ('"a,b=c"', "a,b=c")),
        *((r"'it\'s'", "it's"), ("'数学/[v2]'", "数学/[v2]"), ("null", None), ("'null'", "null"), ("", "")),
    ],
)
def test_values_mean_what_they_do_in_hydra(typed, value):
    assert compose_run("demo", [f"++logging.wandb={typed}"]).run.logging.wandb == value


def test_interpolations_still_resolve():
    run = compose_run("demo", ["model.path=m/x", "logging.wandb=${model.path}-1"]).run
    assert run.logging.wandb == "m/x-1"


def test_the_home_directory_is_expanded_wherever_a_path_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = compose_run("qwen25_3b_910b", [f"{key}='~/x y/{key}'" for key in PATH_KEYS]).run
    values = run.model_dump()
    assert {key: functools.reduce(operator.getitem, key.split("."), values) for key in PATH_KEYS} == {
        key: f"{tmp_path}/x y/{key}" for key in PATH_KEYS
    }
    assert "~" not in str(run.mindspeed_rl)  # keys that are made of ours
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\nmodel: {path: ~/m}\nlogging: {wandb: ~/no path}\n")
    mine = compose_run("~/mine.yaml").run
    assert (mine.model.path, mine.logging.wandb) == (f"{tmp_path}/m", "~/no path")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.columns={}"], {}),
        (["data.columns={question: q, answer: a}"], {"question": "q", "answer": "a"}),
        (["data.columns.id=i"], {"messages": "m", "id": "i"}),
        (["data.columns={}", "data.columns.messages=chat"], {"messages": "chat"}),
    ],
)
def test_a_mapping_replaces_the_one_of_the_file(tmp_path, overrides, expected):
    text = "defaults: [base, {override /data: records}, _self_]\ndata: {train: x.jsonl, columns: {messages: m}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert compose_run(str(tmp_path / "mine.yaml"), overrides).run.data.columns == expected


def test_every_free_form_key_of_ours_is_replaced():
    sections = RunConfig().model_dump().items()
    free = [f"{name}.{key}" for name, keys in sections if isinstance(keys, dict) for key in keys if keys[key] == {}]
    assert sorted(MAPPING_KEYS) == sorted(free)


LONG = [(f"rollout.prompts={'9' * 5000}", ""), (f"data.grader_options={'[' * 2000}{']' * 2000}", "")]


@pytest.mark.parametrize("every", EVERY)
def test_the_override_is_blamed_and_not_the_file(every):
    """With code, key and the name that is suggested, if there is one."""

    def check(override: str, expected: str) -> None:
        with pytest.raises(UsageError) as caught:
            compose_run("demo", [override])
        message = str(caught.value)
        assert message.startswith(f"override {override[:20]!r}"[:-1])
        assert "demo.yaml" not in message
        assert len(message) < 1000
        code, key, suggested = [*expected.split(), "", "", ""][:3]
        assert [(problem.code, problem.key) for problem in caught.value.problems] == ([(code, key)] if code else [])
        assert suggested in message

    check_rows(check, [*LONG, *read_table(__file__, "refused_overrides.tsv")[::every]])


def test_a_method_is_found_by_another_name():
    with pytest.raises(UsageError, match="'rlvr'"):
        compose_run("demo", ["method=grpo"])


@pytest.mark.parametrize("defaults", ["[nothing, _self_]", "base", "[base, 7]", "[base, {model: [1]}]"])
def test_a_file_is_blamed_for_its_own_mistakes_whatever_is_typed(tmp_path, defaults):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: {defaults}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be composed") as caught:
        compose_run(str(mine), ["seed=3"])
    assert caught.value.exit_code == 1


FILE = """
defaults: [qwen25_7b_910b, _self_]
mindspeed_rl: {actor_config: {tensor_model_parallel_size: 2}}
method: {name: joint}
"""


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        ("parallel=tp4", "mindspeed_rl.actor_config.tensor_model_parallel_size"),
        ("model=qwen3_8b", "mindspeed_rl.actor_config.tensor_model_parallel_size"),
        ("method=caliber", "method.name"),
        ("method=joint", ""),
        ("parallel=tp2pp2", ""),
        ("parallel=tp4 mindspeed_rl.actor_config.tensor_model_parallel_size=4", ""),
        ("hardware=ascend_910c", ""),
    ],
)
def test_a_group_of_which_the_file_sets_other_values_is_refused(typed, refused, tmp_path):
    """The file's values win, so the group would be applied in part."""
    (file := tmp_path / "mine.yaml").write_text(FILE)
    if not refused:
        assert compose_run(str(file), typed.split()).run.method.name == "joint"
        return
    with pytest.raises(UsageError) as caught:
        compose_run(str(file), typed.split())
    assert refused in str(caught.value)
