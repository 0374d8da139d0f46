"""Every key of MindSpeed-RL that one of our keys also sets can be set in one place only, in both releases."""

import copy
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.start.run_file import StageFiles, written_keys
from coca_mindspeed.mindspeed.upstream_keys import mapped_keys, mapped_values, our_keys, places, set_twice

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
