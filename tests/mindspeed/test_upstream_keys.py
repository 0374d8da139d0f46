"""Keys of MindSpeed-RL: the shipped list, the keys that ours set, and the comparison of docs/port.md."""

import copy
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.start.run_file import StageFiles, written_keys
from coca_mindspeed.mindspeed.upstream_keys import (
    SHIPPED,
    mapped_keys,
    mapped_values,
    our_keys,
    places,
    set_twice,
    shipped_keys,
)
from tests.mindspeed.test_patch_export import CHECKOUTS
from tests.support.mindspeed_keys import shipped_text
from tests.tables import read_table
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
    if not all(homes.values()):
        pytest.skip(f"needs checkouts: {' and '.join(CHECKOUTS.values())} (docs/port.md)")
    assert shipped_text({release: Path(str(home)) for release, home in homes.items()}) == SHIPPED.read_text()


def test_each_release_has_keys_of_its_own():
    for release, key in (("2.3.0", "lora_r"), ("master", "variable_seq_length")):
        values = OmegaConf.from_dotlist([f"actor_config.{key}=4"])
        assert [problem.key for problem in shipped_keys(release).problems(values)] == [f"actor_config.{key}"]


RUN = compose_run("qwen25_7b_910b").run
WRITTEN = written_keys(RUN, 1961, StageFiles(Path("runs")))
ALL = [*mapped_keys(), *WRITTEN]


def with_another_value(keys):
    """The run with another value of each of these keys of MindSpeed-RL."""
    values = copy.deepcopy(RUN.mindspeed_rl)
    for key in keys:
        *sections, name = key.split(".")
        content = values
        for section in sections:
            content = content.setdefault(section, {})
        content[name] = "another"
    return RUN.model_copy(update={"mindspeed_rl": values})


def test_a_ready_made_run_has_what_our_keys_say():
    assert list(set_twice(RUN, WRITTEN)) == []
    assert len(mapped_keys()) > 40
    assert mapped_values(RUN)["actor_config.lr"] == (1e-6, "optimizer.lr")
    assert "generate_config.max_num_seqs" not in mapped_keys(), "its default also reads keys of MindSpeed-RL"
    assert "actor_config.load" not in mapped_keys("host")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("spelling", ["_", "-"])
def test_another_value_of_any_of_them_is_refused(place, spelling):
    """In each of the sections that MindSpeed-RL merges, and as it spells its keys."""
    keys = [
        key for key in ALL if len(places(key, "actor")) > place and (spelling == "_" or not key.startswith("coca."))
    ]
    typed = [places(key, "actor")[place] for key in keys]
    spelled = [
        f"{section}.{name.replace('_', spelling)}" for section, _, name in (key.rpartition(".") for key in typed)
    ]
    found = {problem.key: problem for problem in set_twice(with_another_value(spelled), WRITTEN)}
    assert set(found) == {f"mindspeed_rl.{key}" for key in typed}
    for key, name in zip(keys, typed, strict=True):
        problem = found[f"mindspeed_rl.{name}"]
        assert (problem.code, problem.value) == ("set-twice", "another")
        assert all(ours in problem.fix for ours in our_keys(mapped_keys().get(key, "")))


def test_check_refuses_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    keys = ("actor_config.lr", "megatron_training.train_iters", "actor_config.save_interval", "rl_config.wandb_project")
    typed = [f"mindspeed_rl.{key}={'p' if key.startswith('rl') else 10}" for key in keys]
    assert main(["check", "qwen25_7b_910b", *typed, "--stage", "0", "--write", str(file)]) == 1
    error = capsys.readouterr().err
    refused = {line.split("=")[0] for line in error.splitlines() if "[set-twice]" in line}
    assert refused == {f"mindspeed_rl.{key}" for key in keys}
    assert not file.exists()


def test_our_side_of_the_comparison_with_upstreams_yaml():
    own = ours()
    for key, (_, value) in rows().items():
        assert own.get(key, NOT_SET) == value, key
