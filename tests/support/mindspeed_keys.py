"""Read the keys of MindSpeed-RL and their types from the sources of its config classes, without importing them.

``python -m tests.support.mindspeed_keys 2.3.0=CHECKOUT master=CHECKOUT`` writes the list that the package ships, and
``patches/mindspeed_rl_*.patch``, which have no context and so hold no line of MindSpeed-RL.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.hooks import export_patch
from coca_mindspeed.mindspeed.upstream_keys import ANY, CLASSES, NESTED, SHIPPED, UpstreamKeys, list_of
from coca_mindspeed.upstream.manifest import load_manifests, manifest_directory, manifest_of

_LENIENT = ("profile_ranks", "num_cpus_for_local_task")  # "all" or a list; Ray takes a part of a CPU


def read_upstream_keys(root: Path) -> UpstreamKeys:
    """The keys of the MindSpeed-RL below ``root``; raises ``ConfigError`` if it lacks a config class."""
    sections: dict[str, dict[str, str]] = {}
    for section, (module, name) in CLASSES.items():
        path = root / "mindspeed_rl" / "config_cls" / f"{module}.py"
        defaults = _defaults(path, name)
        known = {key: ANY if key in _LENIENT else _type(value, defaults) for key, value in defaults.items()}
        sections[section] = {**known, "model": ANY} if module == "megatron_config" else known
        for nested in NESTED:
            if nested.startswith(f"{section}."):
                sections[nested] = _literal_types(defaults.get(nested.removeprefix(f"{section}.")), path, nested)
    return UpstreamKeys(f"the MindSpeed-RL at {root}", sections)


def shipped_text(checkouts: Mapping[str, Path]) -> str:
    """The text of the shipped list, from a checkout of each release."""
    keys = {release: read_upstream_keys(root).sections for release, root in checkouts.items()}
    lists = {release: {list_of(name): sections[name] for name in sections} for release, sections in keys.items()}
    return json.dumps(lists, indent=1, sort_keys=True) + "\n"


def _type(value: ast.expr | None, defaults: Mapping[str, ast.expr | None]) -> str:
    """The type of a default; a reference to another attribute has that one's."""
    match value:
        case ast.Attribute(attr=name) if name in defaults:
            return _type(defaults[name], {})
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, default]):  # config_dict.get(KEY, DEFAULT)
            return _type(default, {})
        case ast.BinOp(left=left):
            return _type(left, {})
        case ast.Dict():
            return "dict"
        case ast.List():
            return "list"
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return type(constant).__name__
        case _:
            return ANY


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


def _literal_types(value: ast.expr | None, path: Path, name: str) -> dict[str, str]:
    if not isinstance(value, ast.Dict):
        raise ConfigError(f"MINDSPEED_RL_HOME: expected {name}'s default in {path} to be a mapping, found none")
    items = zip(value.keys, value.values, strict=True)
    return {str(key.value): _type(default, {}) for key, default in items if isinstance(key, ast.Constant)}


if __name__ == "__main__":
    named = (argument.partition("=") for argument in sys.argv[1:])
    checkouts = {release: Path(root) for release, _, root in named}
    releases = {manifest.release for manifest in load_manifests()}
    if set(checkouts) != releases:  # the list is written anew, so a release that is left out would be lost
        sys.exit(f"usage: {sys.argv[0]} {' '.join(f'{release}=CHECKOUT' for release in sorted(releases))}")
    SHIPPED.write_text(shipped_text(checkouts), encoding="utf-8")
    for release, root in checkouts.items():
        patch = manifest_directory() / f"mindspeed_rl_{release}.patch"
        patch.write_text(export_patch(manifest_of(release), root, context=0), encoding="utf-8")
