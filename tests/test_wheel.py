"""The built wheel: installed without this source tree, its commands and its configurations work."""

import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from coca_mindspeed import __version__

ROOT = Path(__file__).parents[1]
_SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "coca_mindspeed", "coca_router", "configs", "patches")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """``bin`` of a new environment with the wheel; it sees the dependencies of this one, and not the source tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in _SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    _run(sys.executable, "-c", build, str(directory), cwd=source)
    (wheel,) = directory.glob("*.whl")
    shutil.rmtree(source)
    environment = directory / "environment"
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-index"]
    _run(*pip, "--disable-pip-version-check", str(wheel), cwd=directory)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(str(Path(find_spec("omegaconf").origin).parents[1]))
    return environment / "bin"


def _run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (("coca-mindspeed", "--version"), __version__),
        (("coca-mindspeed", "--help"), "evaluate"),
        (("coca-router", "--help"), "serve"),
        (("coca-mindspeed", "config", "get", "qwen25_7b_910b", "optimizer.lr"), "1e-06"),
        (("coca-mindspeed", "check", "qwen3_8b_910b"), "8.19 billion"),
        (("coca-mindspeed", "check", "coca_qwen25_7b"), "learning rate"),
        (("python", "-c", "import coca_mindspeed; print(coca_mindspeed.__file__)"), "environment"),
        (
            ("python", "-c", "from coca_mindspeed.upstream.manifest import load_manifests as m; print(len(m()))"),
            "2",
        ),
    ],
)
def test_it_runs_where_nothing_else_of_it_is(programs, tmp_path, command, printed):
    name, *arguments = command
    assert printed in _run(programs / name, *arguments, cwd=tmp_path)


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert len(cited["references"][0]["authors"]) == 8
