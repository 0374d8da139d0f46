"""Requirement files for Ascend hold what setup.py asks for, without what the other framework's environment brings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_MINDSPEED_RL = {"torch", "transformers", "tokenizers", "safetensors"}
OF_VERL = {*OF_MINDSPEED_RL, "numpy"}  # verl 0.9.1 needs 2, MindSpeed-RL 1


def name(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower()


def of_setup(keyword):
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    [value] = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == keyword]
    return ast.literal_eval(value)


def requirements(file):
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_packages_of_mindspeed_rl_are_those_of_setup():
    """And those of ``collect``."""
    every = [*of_setup("install_requires"), *of_setup("extras_require")["judge"]]
    wanted = {name(entry) for entry in every} - OF_MINDSPEED_RL
    assert sorted(map(name, requirements("ascend.txt"))) == sorted(wanted)


def test_the_packages_of_verl_are_those_of_setup_with_its_ranges():
    """A narrower range would replace a package of verl's environment."""
    extra = [entry for entry in of_setup("extras_require")["verl"] if name(entry) != "verl"]
    wanted = [entry for entry in of_setup("install_requires") if name(entry) not in OF_VERL]
    assert requirements("verl-ascend.txt") == [*wanted, *extra]


@pytest.mark.parametrize(("recipe", "file"), [("verl_ascend", "verl-ascend.txt")])
def test_a_recipe_installs_its_own_file(recipe, file):
    text = (ROOT / "recipes" / recipe / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"requirements/(\S+)", text) == [file]
