"""Keys of MindSpeed-RL: the shipped list, the key table, and the comparison of docs/port.md."""

import copy
import os
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run, config_directory
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import facts_of, unread_keys
from coca_mindspeed.errors import ConfigError, raise_problems
from coca_mindspeed.mindspeed.checks import ignored_keys, key_classes
from coca_mindspeed.mindspeed.keys import (
    TABLE,
    WRITTEN,
    leaves,
    own_values,
    places,
    put,
    set_twice,
    translate,
    written_as,
)
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.upstream_keys import SHIPPED, shipped_keys
from coca_mindspeed.utils.text_formats import read_yaml
from tests.mindspeed.builders import mindspeed_config
from tests.mindspeed.test_patch_export import CHECKOUTS
from tests.support.mindspeed_keys import PACKAGES, homes_of, shipped_text
from tests.tables import EVERY, check_rows, read_table
from tests.upstream_settings import NOT_SET, ours, rows


def test_sections_keys_and_shapes_are_read_as_mindspeed_rl_reads_them():
    values = {
        "model": {"tiny": {"num-layers": 2}, "another": {"is_never_read": 1}},
        "megatron_training": {"model": "tiny", "lr": 1.0},
        "rl_config": {"use_dynamic_bsz": True, "actor_resource": {"num_npus": 8}},
        "generate_config": {"sampling_config": {"top_k": -1}},
        "profiler_config": {"integrated": {"stage": "all"}},
        "coca": {"ours": 1},
    }
    assert shipped_keys().problems(values) == []
    assert shipped_keys().problems(OmegaConf.create(values)) == []
    values["model"]["tiny"]["num_layer"] = values["foo"] = 1  # type: ignore[index]
    values["rl_config"]["use_dynamic_bs"] = True
    found = shipped_keys().problems(values)
    keys = ["foo", "rl_config.use_dynamic_bs", "model.tiny.num_layer"]
    assert [(problem.code, problem.key) for problem in found] == [("unknown-key", key) for key in keys]
    assert "'use_dynamic_bsz'" in found[1].expected


@pytest.mark.parametrize(("setting", "code", "why"), read_table(__file__, "shipped_keys.tsv"))
def test_shipped_keys(setting, code, why):
    found = [(problem.code, problem.key) for problem in shipped_keys().problems(OmegaConf.from_dotlist([setting]))]
    assert [each for each, _ in found] == [code] * bool(code), why
    assert all(setting.startswith(key) for _, key in found)


@pytest.mark.published
def test_the_shipped_list_is_that_of_the_sources() -> None:
    homes = {release: os.environ.get(variable) for release, variable in CHECKOUTS.items()}
    if not all((*homes.values(), *map(os.environ.get, PACKAGES.values()))):
        pytest.skip(f"needs checkouts: {', '.join((*CHECKOUTS.values(), *PACKAGES.values()))} (docs/port.md)")
    releases = {release: Path(str(home)) for release, home in homes.items()}
    assert shipped_text(releases, homes_of(os.environ)) == SHIPPED.read_text()


def test_each_key_has_a_class_and_each_of_mindspeed_rls_own_a_reader():
    classes = key_classes()
    named = {*classes.rows, *classes.shown, *classes.set_by_us}
    absent = {key for key in named - classes.readers.keys() if not key.startswith("coca.")}
    assert absent == {"ref_config", "reward_config"}  # sections
    kinds = {key: classes.of(key) for key in classes.readers}
    assert {*kinds.values()} == {"read", "set", "none", "upstream"}
    for key, kind in kinds.items():
        if kind == "upstream":
            assert classes.readers[key] is not None, key
        if kind == "none" and key not in classes.rows:
            assert classes.readers[key] is None, key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("megatron_training.lr", "set"),
        ("megatron_training.hidden_dropout", "read"),
        ("megatron_training.tensor_model_parallel_size", "read"),
        ("megatron_training.split", "none"),  # our data set takes its place
        ("megatron_training.eval_iters", "none"),  # only Megatron's own loop reads it
        ("megatron_training.seq_aux", "none"),
        ("megatron_training.use_fused_rmsnorm", "upstream"),
        ("megatron_training.untie_embeddings_and_output_weights", "set"),
        ("megatron_training.disable_bias_linear", "upstream"),  # under the name of Megatron's argument
        ("rl_config.kl_target", "none"),
        ("rl_config.use_dp_batch_balance", "upstream"),
        ("generate_config.enable_prefix_caching", "upstream"),
        ("msprobe_config.dump_path", "upstream"),
    ],
)
def test_classes(key, expected):
    assert key_classes().of(key) == expected


def test_each_release_has_keys_of_its_own():
    for release, key in (("2.3.0", "lora_r"), ("master", "variable_seq_length")):
        values = OmegaConf.from_dotlist([f"actor_config.{key}=4"])
        assert [problem.key for problem in shipped_keys(release).problems(values)] == [f"actor_config.{key}"]


RUN = compose_run("qwen25_7b_910b").run
ALL = [*own_values(RUN), *WRITTEN]


def test_a_ready_made_run_has_what_our_keys_say():
    assert list(set_twice(RUN)) == []
    values = translate(RUN)
    assert (values["actor_config"]["lr"], values["megatron_training"]["seed"]) == (RUN.optimizer.lr, RUN.seed + 1)
    assert values["rl_config"]["mini_batch_size"] == RUN.rollout.prompts // RUN.trainer.minibatches
    host = compose_run("qwen25_7b_910b", ["hardware=host", "mindspeed_rl.actor_config.load=/mcore"]).run
    assert (list(set_twice(host)), translate(host)["actor_config"]["load"]) == ([], "/mcore")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("spelling", ["_", "-"])
def test_another_value_of_any_of_them_is_refused(place, spelling):
    """In each of the sections that MindSpeed-RL merges, and as it spells its keys."""
    keys = {key: names[place] for key in ALL if len(names := places(key, RUN.mindspeed_rl)) > place}
    values = copy.deepcopy(RUN.mindspeed_rl)
    for place_of_key in keys.values():
        section, _, name = place_of_key.rpartition(".")
        put(values, f"{section}.{name.replace('_', spelling)}", "another")
    found = {problem.key: problem for problem in set_twice(RUN.model_copy(update={"mindspeed_rl": values}))}
    assert set(found) == {f"mindspeed_rl.{name}" for name in keys.values()}
    for key, name in keys.items():
        problem = found[f"mindspeed_rl.{name}"]
        assert (problem.code, problem.value) == ("set-twice", "another")
        assert all(ours in problem.fix for ours in (TABLE[key].ours if key in own_values(RUN) else ()))


@pytest.mark.parametrize("section", ["coca", "model.actor", "generate_config.sampling_config"])
def test_a_section_that_is_no_mapping_is_named(section):
    values = copy.deepcopy(RUN.mindspeed_rl)
    put(values, section, 7) if "." in section else values.update({section: 7})
    with pytest.raises(ConfigError) as caught:
        translate(RUN.model_copy(update={"mindspeed_rl": values}))
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        ("wrong-type", f"mindspeed_rl.{section}")
    ]


def keys_named(text):
    """Dotted keys and options in a message, without the list of known keys."""
    return re.findall(r"(?<![\w.])(?:--)?[a-z_]+(?:\.[a-z_]+)+|--[a-z]+", text.partition("; known:")[0])


@pytest.mark.parametrize("every", EVERY)
def test_a_key_of_mindspeed_rl_is_answered_by_how_a_run_writes_it(every):
    """With and without its section, and in one of ours."""

    def check(override, keys):
        with pytest.raises(ConfigError) as caught:
            raise_problems(make_plan(compose_run("qwen25_7b_910b", [override], upstream=written_as).run).problems)
        [problem] = caught.value.problems
        assert keys_named(problem.fix or problem.expected) == keys.split()

    check_rows(check, read_table(__file__, "written_keys.tsv")[::every])


def test_every_key_that_ours_set_is_answered_by_ours():
    schema = facts_of(RunConfig)
    for key, entry in TABLE.items():
        section, _, name = key.rpartition(".")
        if section.startswith("model."):  # our section ``model`` has keys of its own
            continue
        value = {"sampling_config": {name: 1}} if section.endswith(".sampling_config") else {name: 1}
        assert written_as(section.partition(".")[0], value, RUN.mindspeed_rl)[-1] == entry.ours[-1]
        if not any(known.rpartition(".")[2] == name for known in schema):
            assert written_as(name, 1, {})[-1] == entry.ours[-1]


def test_no_key_of_ours_is_ignored_in_silence():
    """A key is refused by its facts, or MindSpeed-RL's configuration reads it, or it is one of these."""
    facts = facts_of(RunConfig)
    unread = unread_keys(RunConfig, "mindspeed_rl")
    keys = {key for key in facts if key not in unread and not any(other.startswith(f"{key}.") for other in facts)}
    read = {key for entry in TABLE.values() for key in entry.ours}
    assert {key for key in keys - read if not key.startswith("method.")} == {
        *("data.epochs", "data.rows"),  # read when the run file is written
        "hardware.reserved_gib",  # of the plan
        *("hardware.nodes", "hardware.npus_per_node"),  # defaults of a free key, which is compared with them
        *("data.name", "model.compute_dtype"),  # checked
        *("mindspeed_rl", "optimizer.betas"),  # by their parts
    }
    assert {"method", "optimizer.betas.0", "optimizer.betas.1"} <= read


def test_no_key_of_the_table_is_in_the_yaml_of_the_machines():
    for path in (config_directory() / "hardware").glob("*.yaml"):
        free = {key for key, _ in leaves(read_yaml(path).get("mindspeed_rl", {}))}
        assert free & TABLE.keys() == ({"actor_config.load"} if path.stem == "host" else set())


def test_ignored_keys():
    rl = {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_penalty": "kl", "verifier_timeout": 30}
    rl |= {"clip_ratio": 0.3}
    own = mindspeed_config(rl_config=rl)
    keys = ["adv_estimator", "use_kl_in_reward", "kl_penalty", "verifier_timeout"]
    found = [(problem.code, problem.key) for problem in ignored_keys(MindSpeedView(own))]
    assert found == [("ignored-key", f"rl_config.{key}") for key in keys]
    theirs = mindspeed_config(rl_config={**rl, "verifier_function": ["acc"], "init_kl_coef": 0.1})
    assert len(list(ignored_keys(MindSpeedView(theirs)))) == 2


def test_check_refuses_and_writes_nothing(tmp_path):
    file, typed = tmp_path / "run.yaml", "mindspeed_rl.megatron_training.train_iters=10"
    assert main(["check", "qwen25_7b_910b", typed, "--write", str(file)]) == 1
    assert not file.exists()


def test_our_side_of_the_comparison_with_upstreams_yaml():
    own = ours()
    for key, (_, value) in rows().items():
        assert own.get(key, NOT_SET) == value, key
