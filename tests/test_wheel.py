"""The built wheel: its commands and its configurations work without this source tree."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from coca_mindspeed import __version__

ROOT = Path(__file__).parents[1]
_PACKAGES = ("coca_mindspeed", "coca_router", "coca_sandbox")
_SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "configs", "patches", *_PACKAGES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The content of the wheel, away from the source tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in _SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(directory)], cwd=source, capture_output=True, check=True)
    shutil.rmtree(source)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory / "installed")
    return directory / "installed"


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (("coca-mindspeed", "--version"), __version__),
        (("coca-mindspeed", "--help"), "evaluate"),
        (("coca-router", "--help"), "serve"),
        (("coca-mindspeed", "check", "qwen3_8b_910b"), "8.19 billion"),
        (
            (
                "python",
                "-c",
                "from coca_mindspeed.config import compose as c; print(c.find_verl_run('coca_qwen25_7b'))",
            ),
            "installed",
        ),
        (("python", "-c", "from coca_mindspeed.upstream import manifest as m; print(m.__file__)"), "installed"),
        (("python", "-c", "from coca_sandbox.inside import harness as h; print(h.__file__)"), "installed"),
        (("python", "-c", "from coca_mindspeed.upstream import manifest as m; print(len(m.load_manifests()))"), "2"),
    ],
)
def test_it_runs_where_nothing_else_of_it_is(installed, tmp_path, command, printed):
    scripts = configparser.ConfigParser()
    scripts.read(next(installed.glob("*.dist-info/entry_points.txt")))
    name, *arguments = command
    if name != "python":
        module, function = scripts["console_scripts"][name].split(":")
        arguments = ["-c", f"import sys, {module}; sys.exit({module}.{function}())", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert printed in done.stdout


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert len(cited["references"][0]["authors"]) == 8
