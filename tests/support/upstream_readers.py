"""Which function of an upstream takes a name from which holder: ``rollout.n``, ``config["n"]``, ``getattr(c, "n")``.

``verl_keys`` and ``mindspeed_keys`` find the readers of an upstream's keys by it.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TEXT = "a text"  # holder of names that a module lists as texts
_METHODS = frozenset(("copy", "get", "items", "keys", "pop", "to_dict", "values"))


class Access(NamedTuple):
    """A name that is taken from a chain of names, and where."""

    name: str
    holders: tuple[str, ...]  # outermost first
    module: str
    function: str

    @property
    def place(self) -> str:
        return f"{self.module}:{self.function}"


def accesses(root: Path, on_path: Callable[[str], bool], prefix: str = "") -> Iterator[Access]:
    """The accesses in the modules below ``root`` whose path, relative to it, is ``on_path``."""
    for file in sorted(root.rglob("*.py")):
        if on_path(module := file.relative_to(root).as_posix()):
            yield from _Reader(f"{prefix}{module}").read(ast.parse(file.read_text(encoding="utf-8")))


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.module, self.inside, self.seen = module, [], []

    def read(self, tree: ast.AST) -> list[Access]:
        self.visit(tree)
        return self.seen

    def visit(self, node):
        if len(chain := _chain(node)) > 1:
            name, *before = (chain if chain[-1] not in _METHODS else chain[:-1])[::-1]
            self.seen.append(Access(name, tuple(before[::-1]), self.module, ".".join(self.inside) or "<module>"))
            for argument in [*node.args[1:], *node.keywords] if isinstance(node, ast.Call) else ():
                self.visit(argument)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            *before, name = node.value.split(".")
            self.seen.append(Access(name, tuple(before) or (TEXT,), self.module, ".".join(self.inside) or "<module>"))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self.inside.append(node.name)
            self.generic_visit(node)
            self.inside.pop()
        else:
            self.generic_visit(node)


def _chain(node: ast.AST) -> list[str]:
    """Names of ``a.b["c"].get("d")``: a, b, c, d; empty if there is another kind of expression in it."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_chain(value), name]
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            return [*_chain(value), name]
        case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
            return [*_chain(value), name]
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            return [*_chain(value), name]
        case ast.Call(func=ast.Attribute(attr="select"), args=[value, ast.Constant(value=str(name)), *_]):
            return [*_chain(value), *name.split(".")]
    return []
