"""Required and optional packages: the names are those of setup.py, and a missing one is named in one line."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.utils import packages

ROOT = Path(__file__).parents[2]


def declared(keyword):
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    [value] = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == keyword]
    return ast.literal_eval(value)


def distribution(requirement):
    return re.match(r"[A-Za-z0-9-]+", requirement)[0]


def named(message):
    """Distributions and the command of a message."""
    found = re.search(r"not installed for .*?: (.*); (pip install .*)", message)
    return found[1].split(", "), found[2]


def test_the_required_packages_are_those_of_setup():
    with pytest.raises(MissingDependencyError) as caught:
        hidden(packages.REQUIRED)
    names, command = named(str(caught.value))
    assert sorted(names) == sorted(map(distribution, declared("install_requires")))
    assert command.startswith("pip install .")


def hidden(names):
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setitem(sys.modules, name, None)
        packages.require(*names, purpose="a test")


EXTRAS = {extra: [name for name, own in packages.EXTRAS.items() if own == extra] for extra in packages.EXTRAS.values()}


@pytest.mark.parametrize(("names", "extra"), [(names, extra) for extra, names in EXTRAS.items()])
def test_an_optional_package_is_named_with_its_extra(names, extra):
    with pytest.raises(MissingDependencyError) as caught:
        hidden(names)
    distributions, command = named(str(caught.value))
    required = [text for text in declared("extras_require")[extra] if not text.startswith("coca-mindspeed[")]
    assert sorted(distributions) == sorted(map(distribution, required))
    *words, last = shlex.split(command.removeprefix("pip install "))
    assert (words.pop(), last) == ("(extra", f"{extra})")
    assert sorted(map(distribution, words)) == sorted(distributions)  # not this package, which would replace a clone
    for word in words:
        SpecifierSet(word.removeprefix(distribution(word)))


def test_without_metadata_the_extra_is_named(monkeypatch):
    def requires(name):
        raise packages.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.importlib.metadata, "requires", requires)
    with pytest.raises(MissingDependencyError) as caught:
        hidden(["openai"])
    assert named(str(caught.value)) == (["openai"], "pip install '.[judge]'")


def test_verl_is_installed_into_an_environment_of_its_own():
    with pytest.raises(MissingDependencyError) as caught:
        hidden(["verl"])
    assert ".venv-verl/.installed" in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_a_module_that_a_package_lacks_names_the_package_and_one_of_this_project_none():
    def missing(name):
        return packages.missing_package(ModuleNotFoundError(name=name))

    assert named(missing("torch.not_there"))[0] == ["torch"]  # damaged, or too old
    assert named(missing("ray.util"))[0] == ["ray"]
    assert missing("coca_mindspeed.not_there") is None


OURS = ("cli", "mindspeed.conversion")
MODULES = [*(f"coca_mindspeed.{name}" for name in OURS), "coca_router", "experiments.reproduce", "benchmarks"]


@pytest.mark.parametrize("module", MODULES)
def test_without_any_package_each_command_line_ends_with_one_line(module):
    arguments = ["serve", "x.yaml"] if module == "coca_router" else ["check", "demo"]
    command = [sys.executable, "-S", "-m", module, *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert {"torch", "hydra-core", "rich"} <= set(named(line)[0])


def test_a_start_without_ray():
    module = "coca_mindspeed.upstream.ray_cluster"
    code = f"import runpy, sys; sys.modules['ray'] = None; runpy.run_module('{module}', run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-c", code, "start", "600"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert named(ran.stderr)[0] == ["ray"]
    assert len(ran.stderr.splitlines()) == 1


def run_hiding(names, arguments, package="coca_mindspeed"):
    """Run a package's command line in a process that cannot import some packages."""
    code = f"import sys; sys.modules.update(dict.fromkeys({names})); from {package}.cli import main\n"
    code += f"sys.exit(main({arguments}))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_a_training_without_the_optional_packages_lacks_only_plots(tmp_path):
    """All extras are hidden; the report names the command that adds plots."""
    optional = ["tensorboard", "matplotlib", "sklearn", "openai", "diskcache", "pyarrow"]
    sizes = ["warm_up.steps=1", "warm_up.batch=4", "trainer.steps=1", "rollout.prompts=2", "rollout.group_size=2"]
    sizes += ["data.train_size=8", "data.evaluate_size=4", "evaluation.preflight=0"]
    arguments = ["demo", *sizes, "trainer.threads=1", "--quiet", "--output", str(tmp_path / "run")]
    ran = run_hiding(optional, arguments)
    assert ran.returncode == 0, ran.stderr
    assert named(ran.stderr)[0] == ["matplotlib"]
    assert "%|" not in ran.stderr  # a progress bar of transformers
    assert "FutureWarning" not in ran.stderr
    report = (tmp_path / "run" / "report.md").read_text()
    assert ".png" not in report
    assert named(report)[0] == ["matplotlib"]
    assert "before" in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("package", "arguments", "command"),
    [
        ("tensorboard", ["train", "demo", "logging.tensorboard=true", "--output", "/nowhere/run"], "coca_mindspeed"),
        ("matplotlib", ["report", "x"], "coca_mindspeed"),
        ("starlette", ["serve", "x.yaml"], "coca_router"),
    ],
)
def test_a_command_that_needs_an_optional_package_says_so_first(package, arguments, command):
    ran = run_hiding([package], arguments, command)
    assert ran.returncode == 1
    assert package in named(ran.stderr)[0]
