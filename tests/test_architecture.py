"""Import rules between the packages (docs/architecture.md, "Import rules")."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

import coca_mindspeed
import coca_router.cli
import coca_sandbox
from coca_mindspeed.cli import COMMANDS
from coca_mindspeed.upstream.manifest import load_manifests
from tests.local.runs_for_tests import SMALL

PACKAGE = Path(coca_mindspeed.__file__).parent
ENGINES = ("local", "mindspeed", "verl")
ABOVE = (*ENGINES, "baselines", "cli", "integrations")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a module imports anywhere in it; ``from a import b`` counts as ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def offenders(package: str, forbidden: tuple[str, ...]) -> list[str]:
    """``module imports name`` for each import of a forbidden root within a package."""
    return [
        f"{module} imports {name}"
        for module, path in modules()
        if module == package or module.startswith(f"{package}.")
        for name in sorted(imports(path))
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]


def first_circle(graph: dict[str, set[str]]) -> list[str]:
    """The names along a circle, the first and the last equal; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circles_of_modules_or_of_folders_beside_each_other():
    """Imports inside functions and under TYPE_CHECKING count."""
    known = {module.removesuffix(".__init__"): path for module, path in modules()}
    folders = {module for module, path in known.items() if path.name == "__init__.py"}
    between_modules: dict[str, set[str]] = {}
    between_folders: dict[str, set[str]] = {}
    for module, path in known.items():
        for name in (name for name in imports(path) if name.startswith("coca_mindspeed.")):
            steps = list(accumulate(name.split(".")[1:], "{}.{}".format))
            if (target := next((step for step in reversed(steps) if step in known), module)) != module:
                between_modules.setdefault(module, set()).add(target)
            pairs = zip(accumulate(module.split("."), "{}.{}".format), steps, strict=False)
            if (pair := next((pair for pair in pairs if pair[0] != pair[1]), None)) and folders.issuperset(pair):
                between_folders.setdefault(pair[0], set()).add(pair[1])
    assert {"data", "grading", "mindspeed.stages"} <= between_folders.keys()
    assert first_circle(between_modules) == []
    assert first_circle(between_folders) == []


def ours(*packages: str) -> tuple[str, ...]:
    return tuple(f"coca_mindspeed.{package}" for package in packages)


# package, what it may not import
RULES = [
    ("algorithm", ("transformers", "tokenizers", "ray")),
    *((package, ours(*ABOVE)) for package in ("scoring", "grading", "data", "evaluation", "config")),
    *((engine, ours("integrations", *(other for other in ENGINES if other != engine))) for engine in ENGINES),
    ("integrations", ours(*ABOVE[:-1])),
]


@pytest.mark.parametrize(("package", "forbidden"), RULES, ids=[f"{package}: {names[0]}" for package, names in RULES])
def test_forbidden_imports(package, forbidden):
    assert offenders(package, forbidden) == []


def test_the_package_imports_no_experiments():
    """The CPU shims of MindSpeed-RL and verl are in tests/support; ``start.process`` loads one by name."""
    assert packages_importing("experiments", "tests", "benchmarks") == set()


def test_nothing_imports_the_router_and_what_it_imports():
    assert packages_importing("coca_router") == set()
    used = {
        tuple(name.split(".")[1:3])
        for path in Path(coca_router.__file__).parent.glob("*.py")
        for name in imports(path)
        if name.startswith("coca_mindspeed.")
    }
    tools = {"algorithm", "cli", "config", "errors", "evaluation", "utils"}
    assert {names for names in used if names[0] not in tools} == {
        ("local", "load"),
        ("local", "policy"),
        ("local", "sampler"),
    }


def test_the_sandbox_imports_only_itself_and_the_standard_library():
    allowed = {"coca_sandbox", *sys.stdlib_module_names}
    for path in Path(coca_sandbox.__file__).parent.rglob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_algorithm_imports_only_torch_and_numpy():
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    for module, path in modules():
        if module.split(".")[0] == "algorithm":
            names = {name for name in imports(path) if not name.startswith("coca_mindspeed.algorithm")}
            assert {name.split(".")[0] for name in names} <= allowed, module


def test_config_imports_only_the_algorithm_and_utilities():
    allowed = {"__version__", "algorithm", "config", "errors", "utils"}
    known = {name for module, path in modules() if module.split(".")[0] == "config" for name in imports(path)}
    assert {name.split(".")[1] for name in known if name.startswith("coca_mindspeed.")} <= allowed


def users_of(*packages: str) -> set[str]:
    """Modules outside these packages that import from them."""
    return {
        module
        for module, path in modules()
        for name in imports(path)
        if name.startswith(tuple(f"{name}." for name in ours(*packages))) and module.split(".")[0] not in packages
    }


def test_which_modules_import_the_engines():
    callers = {"check", "doctor", "config", "launch", "patches"}
    assert users_of("integrations") == set()
    assert users_of("mindspeed", "verl") == {f"cli.{name}" for name in callers}


def packages_importing(*packages: str) -> set[str]:
    """Our packages with a module that imports any of these."""
    return {
        module.split(".")[0] for module, path in modules() for name in imports(path) if name.split(".")[0] in packages
    }


def test_only_the_engines_import_their_upstreams():
    assert packages_importing("mindspeed_rl", "megatron", "mindspeed", "mindspeed_llm") == {"mindspeed"}
    assert packages_importing("verl", "transfer_queue") == {"verl"}
    assert packages_importing("ray") == packages_importing("tensordict") == {"mindspeed", "verl"}
    assert packages_importing("trl", "swift", "accelerate") == {"integrations"}


def test_static_checks_of_verl_runs_do_not_import_verl():
    known = dict(modules())
    waiting = [f"verl.{name}" for name in ("register", "settings", "checks", "plan")]
    waiting += ["verl.checkpoints", "verl.batch", "verl.reward_queue"]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        names = imports(known[module])
        assert not {name for name in names if name.split(".")[0] in ("verl", "ray", "transfer_queue")}, module
        ours_ = {name.removeprefix("coca_mindspeed.").rpartition(".")[0] for name in names}
        waiting += [name for name in ours_ if name.startswith("verl.") and name in known and name not in seen]


def test_process_settings_are_read_only_in_entry_points():
    """By functions of the manifests, the classes that they join to upstream's, and actors; others get an argument."""
    entries = {hook.replacement for manifest in load_manifests() for hook in manifest.hooks if hook.replacement}
    others = ("trainer:SegmentTrainer.__init__", "trainer:IterationLog._finish", "reference:WorkerGroup.__new__")
    others += ("reward_worker:RewardWorker.initialize",)
    entries |= {f"coca_mindspeed.mindspeed.stages.{name}" for name in others}
    readers = set()
    for module, path in modules():
        if module == "mindspeed.start.process":  # prepares the process by them
            continue
        for outer in ast.parse(path.read_text(encoding="utf-8")).body:
            name = f"coca_mindspeed.{module}:{getattr(outer, 'name', '')}"
            inner = outer.body if isinstance(outer, ast.ClassDef) and name not in entries else ()
            for place, node in [(f"{name}.{getattr(n, 'name', '')}", n) for n in inner] or [(name, outer)]:
                called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
                readers |= {place} if "process_settings" in called else set()
    assert readers
    assert readers <= entries, sorted(readers - entries)


OURS = ("coca_mindspeed", "coca_router", "coca_sandbox", "experiments", "benchmarks")
ON_UPSTREAM = ("integration", "support")  # on classes that have few public names


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names that are imported from our packages, or replaced by their name as a text."""
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr"):
            names = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
        last = [str(name).rpartition(".")[2] for name in names]
        yield from (name for name in last if name.startswith("_") and not name.endswith("__"))


def test_tests_name_nothing_private():
    """Beside ruff's SLF001, which sees attributes only."""
    code = "from coca_router.a import _b\nm.setattr('coca.a._c', 1)\nm.setattr(a, '_d', 1)\nm.setattr(a, '__init__', 1)"
    assert [*private_names(ast.parse(code))] == ["_b", "_c", "_d"]
    here = Path(__file__).parent
    paths = [path for path in here.rglob("*.py") if path.relative_to(here).parts[0] not in ON_UPSTREAM]
    found = {path.name: [*private_names(ast.parse(path.read_text(encoding="utf-8")))] for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def loaded_after(code: str) -> list[str]:
    """Which packages that take seconds to import, or that few machines have, a new process has imported."""
    heavy = "; print(*(m for m in ('torch', 'transformers', 'sympy', 'ray', 'trl') if m in sys.modules))"
    command = [sys.executable, "-c", f"import sys; {code}{heavy}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()[-1].split()


def test_the_library_imports_no_engine():
    assert offenders("library", ours(*ABOVE)) == []


def test_import_and_parsing_of_the_command_lines_load_nothing_heavy():
    code = "import coca_mindspeed, coca_router.cli as router; from coca_mindspeed import cli; dir(coca_mindspeed)"
    parsers = [f"cli.parser_of([{command!r}])" for command in sorted(COMMANDS)]
    parsers += [f"router.parser([{command!r}])" for command in coca_router.cli.COMMANDS]
    code += f"; [{', '.join(parsers)}]; assert cli.main(['evaluate', 'nowhere.jsonl', '--output', 'new']) == 1"
    assert loaded_after(f"{code}; assert cli.main(['watch', 'nowhere']) == 1") == []


@pytest.mark.usefixtures("verls_keys")
def test_check_of_a_cluster_run_does_not_import_torch():
    checked = [f"assert main(['check', {run!r}]) == 0" for run in ("qwen25_7b_910b", "coca_qwen25_7b")]
    assert loaded_after("; ".join(["from coca_mindspeed.cli import main", *checked])) == []


@pytest.mark.nightly
def test_a_local_run_loads_no_module_of_another_engine(tmp_path):
    sizes = (*SMALL, "warm_up.steps=1", "trainer.steps=1", "evaluation.final_questions=0", "evaluation.interval=0")
    commands = [["check", "demo", *sizes], ["config", "show", "demo"]]
    commands += [["train", "demo", "--quiet", *sizes, "--output", str(tmp_path / "run")]]
    code = f"""
import sys
from coca_mindspeed.cli import main
for command in {commands}:
    assert main(command) == 0, command
print("loaded:", *(name for name in sys.modules if name.startswith({ours("mindspeed", "verl")})))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "loaded:"
    assert (tmp_path / "run" / "model").is_dir()


def test_every_package_has_a_docstring():
    others = {Path(package.__file__) for package in (coca_router, coca_sandbox)}
    for init in sorted({path.parent / "__init__.py" for path in PACKAGE.rglob("*.py")} | others):
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), init


def vague_names(tree: ast.AST) -> Iterator[str]:
    """``line name`` of a vague name that is more than a word between a few lines (see CONTRIBUTING.md)."""
    for node in ast.walk(tree):
        named = {
            ast.arg: lambda node: node.arg,
            ast.Attribute: lambda node: node.attr,
            ast.AnnAssign: lambda node: getattr(node.target, "id", None),
            ast.Return: lambda node: getattr(node.value, "id", None),
        }.get(type(node), lambda node: None)(node)
        if named in VAGUE:
            yield f"{node.lineno} {named}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines: dict[str, list[int]] = {}
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and name.id in VAGUE:
                    lines.setdefault(name.id, []).append(name.lineno)
            yield from (f"{node.lineno} {name}" for name, at in lines.items() if max(at) - min(at) > VAGUE_LINES)


VAGUE, VAGUE_LINES = {"found", "each", "own", "known"}, 10


def test_vague_names_live_for_a_few_lines_only():
    for code, vague in (("def f(found): pass", 1), ("x.own", 1), ("found: int", 1), ("def f():\n  return each", 1)):
        assert len(list(vague_names(ast.parse(code)))) == vague
    long = "def f():\n" + "".join(f"  {'known' if line in (0, 11) else 'other'}({line})\n" for line in range(12))
    assert list(vague_names(ast.parse(long))) == ["1 known"]
    folders = (PACKAGE, Path(coca_router.__file__).parent, Path(coca_sandbox.__file__).parent)
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    named = [f"{file.name}:{name}" for file in files for name in vague_names(ast.parse(file.read_text("utf-8")))]
    assert named == []
