"""YAML of strangers: whatever Python's parser falls over is an error that names the file, wherever one is read."""

import pytest

from coca_mindspeed.cli.watch import dashboard
from coca_mindspeed.config.compose import compose_run, find_verl_run
from coca_mindspeed.errors import CocaError
from coca_mindspeed.local.run_directory import open_run_directory
from coca_mindspeed.mindspeed.native import compose_config
from coca_mindspeed.upstream.manifest import load_manifest
from coca_mindspeed.utils.directories import write_marker
from coca_mindspeed.utils.text_formats import YamlError, parse_yaml, read_yaml
from coca_router.config import read_serving_config
from experiments.reproduce.plan import read_plan

BROKEN = {
    "broken": b"a: [",
    "not UTF-8": b"a: \xff",
    "too deep": b"a: " + b"[" * 600 + b"]" * 600,
    "too long a number": b"a: " + b"9" * 5000,
    "no date": b"a: 2026-13-31",
    "a tag that would run something": b"a: !!python/object/apply:os.getcwd []",
}


def test_what_is_right_is_read(tmp_path):
    assert parse_yaml("a: {b: [1, 0.5, ü]}".encode()) == {"a": {"b": [1, 0.5, "ü"]}}
    assert parse_yaml(b"") is None
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "none.yaml")


READERS = {
    "a run": lambda file: compose_run(str(file), []),
    "a plan": read_plan,
    "a serving configuration": read_serving_config,
    "a manifest": load_manifest,
    "a run on MindSpeed-RL": lambda file: compose_config(file, [], file.parent),
    "a run on verl": lambda file: find_verl_run(str(file)),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_every_reader_names_the_file(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(YamlError):
        read_yaml(file)
    for name, read in READERS.items():
        with pytest.raises(CocaError, match=r"mine\.yaml"):
            pytest.fail(f"{name}: {read(file)}")


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_the_configuration_of_a_run_that_is_there(text, tmp_path):
    (tmp_path / "config.yaml").write_bytes(text)
    write_marker(tmp_path, "run")
    with pytest.raises(CocaError, match=r"config\.yaml"), open_run_directory(tmp_path, resume=True):
        pass
    (tmp_path / "metrics.jsonl").write_text('{"step": 300}\n')
    assert dashboard(tmp_path)[1] is False  # it cannot say whether the run is finished
