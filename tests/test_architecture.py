"""What docs/architecture.md says about who may know whom, held against the imports of every module."""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import coca_mindspeed
from coca_mindspeed.cli import COMMANDS
from coca_mindspeed.upstream.manifest import load_manifests

PACKAGE = Path(coca_mindspeed.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
ENGINES = ("local", "mindspeed", "verl")
ABOVE = (*ENGINES, "baselines", "reproduce", "commands", "cli")


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


def offenders(room: str, forbidden: tuple[str, ...]) -> list[str]:
    """``module imports name`` for each import of a forbidden root within a room (a first part of a dotted name)."""
    return [
        f"{module} imports {name}"
        for module, path in modules()
        if module == room or module.startswith(f"{room}.")
        for name in sorted(imports(path))
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]


def ours(*rooms: str) -> tuple[str, ...]:
    return tuple(f"coca_mindspeed.{room}" for room in rooms)


# The sentence of the page that each rule holds, and the rule: a room, and what it may not import.
RULES = [
    ("it never sees a tokenizer class, a device name or an engine", "algorithm", ("transformers", "tokenizers", "ray")),
    *(
        ("`judging`, `grading`, `data`, `evaluation` and `config` never import an engine", room, ours(*ABOVE))
        for room in ("judging", "grading", "data", "evaluation", "config")
    ),
    *(
        ("Engines never import each other", engine, ours(*(other for other in ENGINES if other != engine)))
        for engine in ENGINES
    ),
]


@pytest.mark.parametrize(("sentence", "room", "forbidden"), RULES, ids=[f"{r[1]}: {r[2][0]}" for r in RULES])
def test_who_may_know_whom(sentence, room, forbidden):
    assert sentence in " ".join(PAGE.split()), "the page no longer says what this rule holds"
    assert offenders(room, forbidden) == []


def test_the_algorithm_imports_torch_and_numpy_and_nothing_of_ours():
    assert "`algorithm` imports torch and NumPy and nothing of ours" in " ".join(PAGE.split())
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    for module, path in modules():
        if module.split(".")[0] == "algorithm":
            names = {name for name in imports(path) if not name.startswith("coca_mindspeed.algorithm")}
            assert {name.split(".")[0] for name in names} <= allowed, module


def test_config_knows_the_algorithms_names_and_how_files_are_read_and_tables_written():
    sentence = "`config` knows the algorithm's names and nothing else of ours but how files are read and tables written"
    assert sentence in " ".join(PAGE.split())
    rooms = {"algorithm", "config", "errors", "files", "json_text", "markdown", "yaml_text"}
    known = {name for module, path in modules() if module.split(".")[0] == "config" for name in imports(path)}
    assert {name.split(".")[1] for name in known if name.startswith("coca_mindspeed.")} <= rooms


def users_of(*rooms: str) -> set[str]:
    """Modules outside of these rooms that import something of them."""
    return {
        module
        for module, path in modules()
        for name in imports(path)
        if name.startswith(tuple(f"{room}." for room in ours(*rooms))) and module.split(".")[0] not in rooms
    }


def test_who_calls_the_engines():
    page = " ".join(PAGE.split())
    assert "of `serving`, `model_server.py` alone does" in page
    assert {module for module in users_of(*ENGINES) if module.startswith("serving.")} == {"serving.model_server"}
    assert "the commands `check`, `doctor`, `data export`, `config keys` and the smoke run's `verl_smoke` call" in page
    callers = {"check", "check_verl", "doctor", "data_export", "config", "verl_smoke"}
    assert users_of("mindspeed", "verl") == {f"commands.{name}" for name in callers}


def speakers(*packages: str) -> set[str]:
    """Rooms with a module that imports any of these packages."""
    return {
        module.split(".")[0] for module, path in modules() for name in imports(path) if name.split(".")[0] in packages
    }


def test_each_upstream_is_spoken_by_its_own_engine():
    page = " ".join(PAGE.split())
    assert "Only `mindspeed/` imports MindSpeed-RL or Megatron" in page
    assert speakers("mindspeed_rl", "megatron", "mindspeed", "mindspeed_llm") == {"mindspeed"}
    assert "Only `verl/` imports verl and TransferQueue" in page
    assert speakers("verl", "transfer_queue") == {"verl"}
    assert "Only these two engines import Ray, and tensordict, the form in which both upstreams' rows travel" in page
    assert speakers("ray") == speakers("tensordict") == {"mindspeed", "verl"}


def test_nothing_imports_the_stand_ins_of_verls_engine():
    assert "nothing imports its `host/`" in " ".join(PAGE.split())
    inside = "coca_mindspeed.verl.host"
    users = {module for module, path in modules() for name in imports(path) if name.startswith(inside)}
    assert {module for module in users if not module.startswith("verl.host")} == set()


def test_what_can_be_said_of_verl_without_it_imports_nothing_of_it():
    assert "stands in modules that do not import it" in " ".join(PAGE.split())
    known = dict(modules())
    waiting = [f"verl.{name}" for name in ("register", "settings", "required_keys", "configuration", "run_layout")]
    waiting += ["verl.records", "verl.advantage_step", "verl.judging_queue", "verl.held_out_questions"]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        names = imports(known[module])
        assert not {name for name in names if name.split(".")[0] in ("verl", "ray", "transfer_queue")}, module
        ours_ = {name.removeprefix("coca_mindspeed.").rpartition(".")[0] for name in names}
        waiting += [name for name in ours_ if name.startswith("verl.") and name in known and name not in seen]


def test_only_the_host_platform_pretends_that_an_npu_is_there():
    assert "only `host_platform/` pretends that an NPU is there" in " ".join(PAGE.split())
    users = {
        module
        for module, path in modules()
        for name in imports(path)
        if name.startswith("coca_mindspeed.mindspeed.host_platform")
        and not module.startswith("mindspeed.host_platform")
    }
    # It is loaded in one place, and only where a configuration asks for it.
    assert users == {"mindspeed.start.process"}


def test_the_settings_of_a_process_are_read_where_mindspeed_rl_calls_us_and_passed_on_from_there():
    """By what the manifests name, and by what Ray starts; everything else takes them as an argument."""
    entries = {hook.replacement for manifest in load_manifests() for hook in manifest.hooks if hook.replacement}
    entries |= {f"coca_mindspeed.mindspeed.{name}" for name in ("stages.reward_worker:RewardWorker.initialize",)}
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


def loaded_after(code: str) -> list[str]:
    """Which packages that take seconds to import, or that few machines have, a new process has imported."""
    heavy = "; print(*(m for m in ('torch', 'transformers', 'sympy', 'ray') if m in sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}{heavy}"], capture_output=True, text=True, check=True
    )
    return shown.stdout.splitlines()[-1].split()


def test_importing_the_package_needs_nothing_heavy():
    assert "`import coca_mindspeed` needs neither torch nor Ray nor MindSpeed-RL nor verl" in " ".join(PAGE.split())
    assert loaded_after("import coca_mindspeed.cli") == []
    assert loaded_after("import coca_mindspeed; dir(coca_mindspeed)") == []


def test_the_library_imports_no_engine():
    assert "`library.py` imports no engine" in " ".join(PAGE.split())
    assert offenders("library", ours(*ABOVE, "serving")) == []


def test_what_is_typed_is_understood_before_anything_heavy_is_imported():
    """Every command but ``baseline``, whose options name what its own modules define."""
    parsers = [f"cli._parser([{command!r}])" for command in sorted(COMMANDS.keys() - {"baseline"})]
    assert loaded_after(f"from coca_mindspeed import cli; [{', '.join(parsers)}]") == []


def test_the_plan_of_a_run_for_a_cluster_is_printed_without_torch():
    for run in ("qwen25_7b_910b", "coca_qwen25_7b"):
        assert loaded_after(f"from coca_mindspeed.cli import main; assert main(['check', {run!r}]) == 0") == []


# Names that mean the same thing wherever they stand: a command and what it calls, the loop of each engine, ...
SAME_MEANING = {
    "__init__",
    "config",
    "demo",
    "evaluate",
    "report",
    "trainer",
    "sandbox",
    "lifeline",
    "settings",
    "records",
}


def test_no_two_modules_share_a_name_that_means_two_things():
    places = defaultdict(list)
    for module, _ in modules():
        places[module.split(".")[-1]].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_MEANING} == {}
    assert {name for name in SAME_MEANING if len(places[name]) < 2} == set(), "no longer needed"


def test_every_room_says_what_it_is_for_and_stands_on_the_page():
    for init in sorted(PACKAGE.rglob("__init__.py")):
        tree = ast.parse(init.read_text(encoding="utf-8"))
        room = "/".join(init.parent.relative_to(PACKAGE).parts)
        assert ast.get_docstring(tree), f"{room} has no docstring"
        assert not room or f"{room.split('/')[-1]}/" in PAGE, f"docs/architecture.md does not name {room}/"
