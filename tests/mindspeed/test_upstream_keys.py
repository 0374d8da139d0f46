"""Keys of MindSpeed-RL: the shipped list, and how it is read from the config classes."""

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.mindspeed.upstream_keys import SHIPPED, UpstreamKeys, shipped_keys
from tests.mindspeed.test_patch_export import CHECKOUTS
from tests.support.mindspeed_keys import shipped_text
from tests.tables import read_table

RL = {"use_dynamic_bsz": "bool", "actor_resource": "dict", "a": "int"}
KEYS = UpstreamKeys(
    "MindSpeed-RL",
    {
        "megatron_training": (megatron := {"num_layers": "any", "lr": "float", "model": "any"}),
        "actor_config": megatron,
        **{"rl_config": RL, "rl_config.actor_resource": {"num_npus": "any"}},
        **{"generate_config": {"sampling_config": "dict"}, "generate_config.sampling_config": {"top_k": "int"}},
        **{"profiler_config.integrated": {"stage": "int"}, "msprobe_config": {"dump": "int"}},
    },
)


def test_what_is_known_is_taken():
    values = {
        "model": {"tiny": {"num-layers": 2}, "another": {"is_never_read": 1}},
        "megatron_training": {"model": "tiny", "lr": 1.0},
        "rl_config": {"use_dynamic_bsz": True, "actor_resource": {"num_npus": 8}},
        "generate_config": {"sampling_config": {"top_k": -1}},
        "profiler_config": {"integrated": {"stage": 2}},
        "coca": {"ours": 1},
    }
    assert KEYS.problems(values) == []
    assert KEYS.problems(OmegaConf.create(values)) == []


def test_what_is_not_is_named_with_the_nearest():
    found = KEYS.problems(
        {
            "model": {"tiny": {"num_layer": 2}},
            "actor_config": {"model": "tiny", "made_of_the_others": 1},
            "rl_config": {"use_dynamic_bs": True, "actor_resource": {"npus": 8}},
            "generate_config": {"enable_sleep_mode": True, "sampling_config": {"n": 2}},
            "msprobe_config": {"stage": 1},
            "rl_confg": {"a": 1},
            "foo": 1,
        }
    )
    assert [(problem.key, problem.value) for problem in found] == [
        ("rl_confg", {"a": 1}),
        ("foo", 1),
        ("actor_config.made_of_the_others", 1),
        ("rl_config.use_dynamic_bs", True),
        ("rl_config.actor_resource.npus", 8),
        ("generate_config.enable_sleep_mode", True),
        ("generate_config.sampling_config.n", 2),
        ("msprobe_config.stage", 1),
        ("model.tiny.num_layer", 2),
    ]
    assert {problem.code for problem in found} == {"unknown-key"}
    assert "'rl_config'" in found[0].expected
    assert "'use_dynamic_bsz'" in found[3].expected


@pytest.mark.parametrize(("setting", "code", "why"), read_table(__file__, "shipped_keys.tsv"))
def test_shipped_keys(setting, code, why):
    found = [(problem.code, problem.key) for problem in shipped_keys().problems(OmegaConf.from_dotlist([setting]))]
    assert [each for each, _ in found] == [code] * bool(code), why
    assert all(setting.startswith(key) for _, key in found)


def test_the_shipped_list_is_that_of_the_sources() -> None:
    homes = {release: os.environ.get(variable) for release, variable in CHECKOUTS.items()}
    if not all(homes.values()):
        pytest.skip(f"needs checkouts: {' and '.join(CHECKOUTS.values())} (docs/port.md)")
    assert shipped_text({release: Path(str(home)) for release, home in homes.items()}) == SHIPPED.read_text()


def test_each_release_has_keys_of_its_own():
    for release, key in (("2.3.0", "lora_r"), ("master", "variable_seq_length")):
        values = OmegaConf.from_dotlist([f"actor_config.{key}=4"])
        assert [problem.key for problem in shipped_keys(release).problems(values)] == [f"actor_config.{key}"]
