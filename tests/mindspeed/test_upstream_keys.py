"""Keys of MindSpeed-RL: the shipped list, and how it is read from the config classes."""

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.mindspeed.upstream_keys import SHIPPED, shipped_keys
from tests.mindspeed.test_patch_export import CHECKOUTS
from tests.support.mindspeed_keys import shipped_text
from tests.tables import read_table


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


def test_the_shipped_list_is_that_of_the_sources() -> None:
    homes = {release: os.environ.get(variable) for release, variable in CHECKOUTS.items()}
    if not all(homes.values()):
        pytest.skip(f"needs checkouts: {' and '.join(CHECKOUTS.values())} (docs/port.md)")
    assert shipped_text({release: Path(str(home)) for release, home in homes.items()}) == SHIPPED.read_text()


def test_each_release_has_keys_of_its_own():
    for release, key in (("2.3.0", "lora_r"), ("master", "variable_seq_length")):
        values = OmegaConf.from_dotlist([f"actor_config.{key}=4"])
        assert [problem.key for problem in shipped_keys(release).problems(values)] == [f"actor_config.{key}"]
