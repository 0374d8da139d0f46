"""A MindSpeed-RL checkout, named by the environment, for the tests that need its real code."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = os.environ.get("MINDSPEED_RL_HOME", "")
#: What preprocess_data.py imports besides what the checkout itself holds.
NEEDED = ("datasets", "ray", "tensordict", "hydra", "omegaconf", "word2number", "torch", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

needs_mindspeed_rl = pytest.mark.skipif(
    not HOME or not Path(HOME, "cli", "preprocess_data.py").is_file() or bool(MISSING),
    reason="needs MINDSPEED_RL_HOME, a MindSpeed-RL checkout"
    + (f", and the packages {', '.join(MISSING)}" if MISSING else ""),
)

# Without an NPU, torch_npu and latex2sympy2 are absent, and the package's __init__ would import engines that need
# them.  The script and the modules that it uses are MindSpeed-RL's own, unchanged.
_RUN = """
import importlib.machinery, importlib.util, runpy, sys, types
from unittest.mock import MagicMock

home = sys.argv.pop(1)
for name in ("torch_npu", "latex2sympy2"):
    if importlib.util.find_spec(name) is None:
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
if importlib.util.find_spec("torch_npu") is None or isinstance(sys.modules.get("torch_npu"), MagicMock):
    package = types.ModuleType("mindspeed_rl")
    package.__path__ = [f"{home}/mindspeed_rl"]
    sys.modules["mindspeed_rl"] = package
sys.path.insert(0, home)
sys.argv[0] = f"{home}/cli/preprocess_data.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def preprocess_data(*arguments: str, directory: Path) -> None:
    """Run MindSpeed-RL's ``cli/preprocess_data.py`` with these arguments, in ``directory``.

    Raises:
        AssertionError: it fails; the message holds its output.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUN, HOME, *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
