"""``coca-mindspeed check --write`` writes where it was told and makes no directories."""

from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main

PATCHES = Path(__file__).parents[2] / "patches"

CHECK = ("check", "qwen25_3b_910b", "--quiet", "--output", "/nowhere/run", "--write")


def test_it_says_what_it_wrote(tmp_path, capsys):
    file = tmp_path / "[run].yaml"
    assert main([*CHECK, str(file)]) == 0
    assert capsys.readouterr().out == f"written: {file}\n"
    assert "actor_config" in yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["demo"], 0, "OK"),
        (["qwen25_7b_910b"], 0, "OK"),
        (["qwen25_7b_910b", "rollout.prompts=127", "optimizer.eps=0.1"], 1, "2 problems"),
        (["local", "model.path=/nowhere", "data.train=/x"], 1, "2 problems"),
        (["demo", "rollout.prompt=1"], 2, "1 problem"),
        (["demo", "--resume"], 2, "1 problem"),
        (["nowhere.yaml"], 2, "1 problem"),
    ],
)
def test_the_last_line_is_the_verdict(arguments, code, verdict, capsys):
    assert main(["check", *arguments]) == code
    captured = capsys.readouterr()
    assert (captured.err or captured.out).splitlines()[-1] == verdict


def test_it_makes_no_directory(tmp_path, capsys):
    for place in (tmp_path / "typo" / "x.yaml", tmp_path):
        assert main([*CHECK, str(place)]) == 1
        assert f"--write {place}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_patches_verify_takes_the_checkout_in_both_ways(tmp_path, capsys, monkeypatch):
    (tmp_path / "mindspeed_rl").mkdir()
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    assert main(["patches", "verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    hooked = len(yaml.safe_load((PATCHES / "mindspeed_rl_2.3.0.yaml").read_text())["hooks"])
    assert f"{hooked} of {hooked} differ" in shown
    assert main(["patches", "verify", "--mindspeed-rl", str(tmp_path)]) == 1
    assert capsys.readouterr().out == shown
    assert main(["patches", "verify", str(tmp_path), "--mindspeed-rl", str(tmp_path)]) == 2
    assert "one checkout at a time" in capsys.readouterr().err
