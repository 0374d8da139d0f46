"""Read MindSpeed-RL's keys from its sources: type, default, and the function that reads each in a run by the hooks.

With ``MEGATRON_HOME``, ``MINDSPEED_HOME`` and ``MINDSPEED_LLM_HOME`` set,
``python -m tests.support.mindspeed_keys 2.3.0=CHECKOUT master=CHECKOUT`` writes the list that the package ships, and
``patches/mindspeed_rl_*.patch``, which have no context and so hold no line of MindSpeed-RL.

The actor's keys become arguments of Megatron: a reader of one is a function of MindSpeed-RL, Megatron, MindSpeed or
MindSpeed-LLM.  Modules and functions that no run by the hooks executes are left out, and so are those that only check
a value.
"""

import ast
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.hooks import export_patch
from coca_mindspeed.mindspeed.upstream_keys import ANY, CLASSES, NESTED, SHIPPED, UpstreamKey, UpstreamKeys, list_of
from coca_mindspeed.upstream.manifest import load_manifests, manifest_directory, manifest_of
from coca_mindspeed.utils.text_formats import read_yaml
from tests.support.upstream_readers import Access, accesses

_LENIENT = ("profile_ranks", "num_cpus_for_local_task")  # "all" or a list; Ray takes a part of a CPU
_MEGATRON = "MegatronConfig"
#: Package of Megatron's arguments -> the variable of its checkout.
PACKAGES = {"megatron": "MEGATRON_HOME", "mindspeed": "MINDSPEED_HOME", "mindspeed_llm": "MINDSPEED_LLM_HOME"}
_PATH = read_yaml(Path(__file__).with_name("mindspeed_path.yaml"))
# Megatron's ``validate_args`` sets another argument by it.
_SETS_ANOTHER = {"use_rotary_position_embeddings": "megatron/training/arguments.py:validate_args"}

ByName = Mapping[str, Sequence[Access]]


def read_upstream_keys(root: Path) -> UpstreamKeys:
    """The keys of the MindSpeed-RL below ``root``; raises ``ConfigError`` if it lacks a config class."""
    sections: dict[str, dict[str, UpstreamKey]] = {}
    for section, (module, name) in CLASSES.items():
        path = root / "mindspeed_rl" / "config_cls" / f"{module}.py"
        defaults = _defaults(path, name)
        known = {key: _key(key, value, defaults) for key, value in defaults.items()}
        sections[section] = {**known, "model": UpstreamKey(ANY)} if module == "megatron_config" else known
        for nested in NESTED:
            if nested.startswith(f"{section}."):
                sections[nested] = _literals(defaults.get(nested.removeprefix(f"{section}.")), path, nested)
    return UpstreamKeys(f"the MindSpeed-RL at {root}", sections)


def with_readers(keys: UpstreamKeys, root: Path, megatron: ByName, flags: Mapping[str, str]) -> UpstreamKeys:
    """The keys of the MindSpeed-RL below ``root`` with their readers there and in Megatron's packages."""
    theirs = _by_name(accesses(root, _executed("mindspeed_rl")))

    def reader(section: str, key: str) -> str | None:
        if section in NESTED:  # passed on as a whole
            outer, _, key = section.rpartition(".")
            return reader(outer, key)
        holders = _PATH["holders"][list_of(section)]
        if (found := _reader(theirs[key], holders)) is not None or list_of(section) != _MEGATRON:
            return found
        name = flags.get(key, key)
        return _SETS_ANOTHER.get(key) or _reader(megatron[name], holders, skipped=_PATH["functions"])

    sections = {
        section: {key: known._replace(reader=reader(section, key)) for key, known in content.items()}
        for section, content in keys.sections.items()
    }
    return UpstreamKeys(keys.origin, sections)


def megatrons(homes: Mapping[str, Path]) -> tuple[ByName, dict[str, str]]:
    """Accesses in Megatron's packages by their last name, and the names of arguments that differ from their flags."""
    found: list[Access] = []
    flags: dict[str, str] = {}
    for package in PACKAGES:
        root = homes[package] / package
        found += accesses(root, _executed(package), f"{package}/")
        for file in sorted(root.rglob("arguments.py")):
            flags |= _flags(ast.parse(file.read_text(encoding="utf-8")))
    return _by_name(found), flags


def shipped_text(checkouts: Mapping[str, Path], homes: Mapping[str, Path]) -> str:
    """The text of the shipped list, from a checkout of each release and of Megatron's packages: one key a line."""
    arguments = megatrons(homes)
    releases = {}
    for release, root in checkouts.items():
        sections = with_readers(read_upstream_keys(root), root, *arguments).sections
        lists = {list_of(name): sections[name] for name in sections}
        releases[release] = _block({name: _block(content) for name, content in sorted(lists.items())}, raw=True)
    return _block(releases, raw=True) + "\n"


def _block(content: Mapping[str, Any], *, raw: bool = False) -> str:
    rows = ((key, content[key] if raw else json.dumps(content[key])) for key in sorted(content))
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {value}" for key, value in rows) + "\n}"


def _executed(package: str) -> Callable[[str], bool]:
    return lambda module: not any(fnmatch(module, pattern) for pattern in _PATH["unused"][package])


def _by_name(found: Iterator[Access] | list[Access]) -> ByName:
    by_name: dict[str, list[Access]] = defaultdict(list)
    for access in found:
        by_name[access.name].append(access)
    return by_name


def _reader(found: Sequence[Access], holders: Sequence[str | list[str]], skipped: Sequence[str] = ()) -> str | None:
    for access in found:
        if any(fnmatch(name, pattern) for name in access.function.split(".") for pattern in skipped):
            continue
        for holder in holders:
            pattern, name = holder if isinstance(holder, list) else ("*", holder)
            if access.holders[-1:] == (name,) and fnmatch(access.module, pattern):
                return access.place
    return None


def _flags(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of ``--flag`` whose value has another name (``dest``)."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
                names = [word.value for word in node.keywords if word.arg == "dest"]
                for name in names:
                    if isinstance(name, ast.Constant) and flag.startswith("--"):
                        yield flag.removeprefix("--").replace("-", "_"), str(name.value)


def _key(key: str, value: ast.expr | None, defaults: Mapping[str, ast.expr | None]) -> UpstreamKey:
    value = _plain(value, defaults)
    kind = ANY if key in _LENIENT else _type(value)
    return UpstreamKey(kind, _constant(value))


def _plain(value: ast.expr | None, defaults: Mapping[str, ast.expr | None]) -> ast.expr | None:
    """The expression of a default; that of another attribute if it is one's."""
    match value:
        case ast.Attribute(attr=name) if name in defaults:
            return _plain(defaults[name], {})
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, default]):  # config_dict.get(KEY, DEFAULT)
            return default
        case ast.BinOp(left=ast.Call() as left):  # a default times another setting
            return _plain(left, {})
    return value


def _type(value: ast.expr | None) -> str:
    match value:
        case ast.BinOp(left=left):
            return _type(left)
        case ast.Dict():
            return "dict"
        case ast.List():
            return "list"
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return type(constant).__name__
        case _:
            return ANY


def _constant(value: ast.expr | None) -> Any:
    """The value of a default; None if it is no constant."""
    match value:
        case ast.BinOp(left=ast.Constant(value=int(left)), op=ast.Pow(), right=ast.Constant(value=int(right))):
            return left**right
        case None:
            return None
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def _defaults(path: Path, name: str) -> dict[str, ast.expr | None]:
    """Attributes that ``__init__`` sets on ``self`` before it reads the configuration: their names are the keys."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"MINDSPEED_RL_HOME: expected MindSpeed-RL's class {name} in {path}: {error}") from error
    for statement in ast.walk(module):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            for method in statement.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return dict(_assigned(method))
    raise ConfigError(f"MINDSPEED_RL_HOME: expected MindSpeed-RL's class {name} with an __init__ in {path}, found none")


def _assigned(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in method.body:
        if isinstance(statement, ast.Expr) and _is_update(statement.value):
            return
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, node.value


def _is_update(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"


def _literals(value: ast.expr | None, path: Path, name: str) -> dict[str, UpstreamKey]:
    if not isinstance(value, ast.Dict):
        raise ConfigError(f"MINDSPEED_RL_HOME: expected {name}'s default in {path} to be a mapping, found none")
    items = zip(value.keys, value.values, strict=True)
    return {str(key.value): _key("", default, {}) for key, default in items if isinstance(key, ast.Constant)}


def homes_of(environment: Mapping[str, str]) -> dict[str, Path]:
    """Checkouts of Megatron's packages by their variables."""
    return {package: Path(environment[variable]) for package, variable in PACKAGES.items()}


def main() -> None:
    named = (argument.partition("=") for argument in sys.argv[1:])
    checkouts = {release: Path(root) for release, _, root in named}
    releases = {manifest.release for manifest in load_manifests()}
    # The list is written anew, so a release that is left out would be lost.
    if set(checkouts) != releases or any(variable not in os.environ for variable in PACKAGES.values()):
        variables = " ".join(f"{variable}=CHECKOUT" for variable in PACKAGES.values())
        arguments = " ".join(f"{release}=CHECKOUT" for release in sorted(releases))
        sys.exit(f"usage: {variables} python -m tests.support.mindspeed_keys {arguments}")
    SHIPPED.write_text(shipped_text(checkouts, homes_of(os.environ)), encoding="utf-8")
    for release, root in checkouts.items():
        patch = manifest_directory() / f"mindspeed_rl_{release}.patch"
        patch.write_text(export_patch(manifest_of(release), root, context=0), encoding="utf-8")


if __name__ == "__main__":
    main()
