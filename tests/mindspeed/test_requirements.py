"""requirements/ascend.txt holds what setup.py asks for, without what MindSpeed-RL's environment brings."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_MINDSPEED_RL = {"torch", "transformers", "tokenizers", "safetensors"}


def name(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower()


def test_the_packages_are_those_of_setup():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    [wanted] = [
        ast.literal_eval(keyword.value)
        for keyword in ast.walk(tree)
        if isinstance(keyword, ast.keyword) and keyword.arg == "install_requires"
    ]
    lines = (ROOT / "requirements" / "ascend.txt").read_text(encoding="utf-8").splitlines()
    listed = [name(line) for line in lines if line and not line.startswith("#")]
    assert sorted(listed) == sorted({name(entry) for entry in wanted} - OF_MINDSPEED_RL)
