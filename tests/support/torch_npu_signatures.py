"""Signatures of torch_npu's operators (names and parameters only), to check calls without an NPU.

``python -m tests.support.torch_npu_signatures WHEEL CHECKOUT...`` writes ``torch_npu_signatures.json``: the operators
called in the checkouts, from the schemas that the wheel registers, without overloads that write to given tensors.
``torch_npu.npu_*`` accepts these names. The functions of ``op_plugin/meta/_meta_registrations.py`` rename some of them
(``mode`` for ``rotary_mode``).
"""

import ast
import functools
import inspect
import json
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_suffix(".json")
_SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_FUNCTION = re.compile(r"(\w+)(?:\.(?!out)\w+)?\((.*)\) ->")


def bind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if no overload of operator ``name`` accepts the arguments."""
    errors = []
    for signature in signatures()[name]:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            errors.append(f"{error} (parameters: {', '.join(signature.parameters)})")
        else:
            return
    raise TypeError(f"torch_npu.{name}: {'; '.join(errors)}")


@functools.cache
def signatures() -> dict[str, list[inspect.Signature]]:
    """The overloads of every operator of the table."""
    table = json.loads(TABLE.read_text())["operators"]
    return {name: [_signature(overload) for overload in overloads] for name, overloads in table.items()}


def _signature(overload: str) -> inspect.Signature:
    """``"x, dim=, *, out"``: ``=`` marks an optional parameter, ``*`` the start of keyword-only ones."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for name in overload.split(", "):
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        default = None if name.endswith("=") else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.rstrip("="), kind, default=default))
    # A schema may have required parameters behind optional ones.
    return inspect.Signature(parameters, __validate_parameters__=False)


def calls(root: Path) -> Iterator[tuple[str, str, int, list[str]]]:
    """Yield ``(file:line, operator, positional arguments, keywords)`` of every plain call ``torch_npu.npu_*(...)``."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "torch_npu.npu_" not in text:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr
            if ast.unparse(node.func) != f"torch_npu.{name}" or not name.startswith("npu_"):
                continue
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            if len(keywords) == len(node.keywords) and not any(isinstance(a, ast.Starred) for a in node.args):
                yield f"{path}:{node.lineno}", name, len(node.args), keywords


def main(wheel: Path, checkouts: Sequence[Path]) -> None:
    called = {name for checkout in checkouts for _, name, _, _ in calls(checkout)}
    with zipfile.ZipFile(wheel) as archive:
        schemas = yaml.safe_load(archive.read(_SCHEMAS))
    operators: dict[str, list[str]] = {}
    for entry in schemas["custom"]:
        match = _FUNCTION.match(entry["func"])
        if match and match[1] in called:
            overloads = operators.setdefault(match[1], [])
            if (overload := ", ".join(_parameters(match[2]))) not in overloads:
                overloads.append(overload)
    release = "-".join(wheel.name.split("-")[:2])
    TABLE.write_text(json.dumps({"package": release, "operators": dict(sorted(operators.items()))}, indent=1) + "\n")


def _parameters(arguments: str) -> Iterator[str]:
    for argument in re.split(r", (?![^\[(]*[\])])", arguments):
        declaration, default, _ = argument.partition("=")
        yield "*" if argument == "*" else declaration.split()[-1] + default


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
