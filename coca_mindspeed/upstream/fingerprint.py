"""Fingerprints of source code, independent of comments and blank lines.

A target is ``package.module:Name`` or ``package.module:Class.method``.  It is parsed, never imported, so that an
installation can be checked on a machine that cannot run it.
"""

import ast
import hashlib
import io
import textwrap
import tokenize
from pathlib import Path

from coca_mindspeed.errors import CocaError


class TargetError(CocaError):
    """A hook's target does not exist."""


def fingerprint(root: Path, target: str) -> str:
    """Return the SHA-256 of the normalised source of ``target`` below ``root``.

    Raises TargetError if the module or the definition does not exist or does not parse.
    """
    return hashlib.sha256(normalise(source_of(root, target)).encode("utf-8")).hexdigest()


def module_path(root: Path, module: str) -> Path:
    """The source file of a dotted module name below ``root``."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(root: Path, target: str) -> str:
    """Return the source of ``target``: a function, a class, an assignment or an import; raises TargetError."""
    module, _, qualified = target.partition(":")
    path = module_path(root, module)
    try:
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise TargetError(f"{target}: {path} cannot be read: {error}") from error
    node: ast.AST | None = None
    for name in qualified.split("."):
        node = next((statement for statement in body if name in _names_bound_by(statement)), None)
        if node is None:
            raise TargetError(f"{target}: {path} has no {name!r}")
        body = getattr(node, "body", [])
    assert isinstance(node, ast.stmt)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _names_bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def normalise(source: str) -> str:
    """Remove comments, blank lines, common indentation and trailing white space.

    Strings, docstrings included, are kept: syntax trees print differently between Python versions, while comments are
    found at the same place by all of them.
    """
    source = textwrap.dedent(source.expandtabs())
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
