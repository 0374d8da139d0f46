"""Names that tests use: Python's, the tests' own, or the program's.

Only the tests decide, never the program: it could supply a ``set`` or ``math`` of its own to its tests.
"""

import ast
import builtins
import symtable
import sys
from collections.abc import Collection
from typing import NamedTuple

# Names that tests use without importing them.
_STANDARD_NAMES = {
    **dict.fromkeys(("ChainMap", "Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("ceil", "floor", "inf", "isclose", "isfinite", "isinf", "isnan", "nan", "pi", "sqrt"), "math"),
    **dict.fromkeys(("chain", "combinations", "permutations"), "itertools"),
    **dict.fromkeys(("date", "datetime", "timedelta"), "datetime"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "deepcopy": "copy",
    "reduce": "functools",
}
_OTHER_MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}


class Names(NamedTuple):
    """Names that the tests leave undefined, except builtins."""

    program: frozenset[str]  # the program's functions, classes and constants
    called: frozenset[str]  # names in ``program`` that the tests call
    standard: dict[str, tuple[str, str | None]]  # modules and their attributes by name, as (module, attribute or None)


def undefined(tests: str, given: Collection[str] = (), entry_point: str | None = None) -> Names:
    """Sort the names that test code uses and does not define. Raises ``SyntaxError``.

    A builtin or standard name (``Counter``, ``math.``) is the program's only if it is the entry point, or if there is
    no entry point and it is the one function that the tests call without wrapping another call (MBPP tests a ``sum``).

    Args:
        given: names that are defined for the tests, such as the prompt's.
        entry_point: the function under test, if known; always the program's.
    """
    free = {name for name in _free(symtable.symtable(tests, "<tests>", "exec")) if not is_dunder(name)}
    called, wrapping, bases = _uses(ast.parse(tests))
    free -= {name for name in given if name != entry_point}
    program: set[str] = set()
    standard: dict[str, tuple[str, str | None]] = {}
    modules = sys.stdlib_module_names | _OTHER_MODULES.keys()
    for name in free:
        if name == entry_point:
            program.add(name)
        elif name in modules and name in bases and name not in called:
            standard[name] = (_OTHER_MODULES.get(name, name), None)
        elif name in _STANDARD_NAMES:
            standard[name] = (_STANDARD_NAMES[name], name)
        elif not hasattr(builtins, name):
            program.add(name)
    if entry_point is None and not program & called:
        tested = (called & free) - wrapping
        if len(tested) == 1:
            program |= tested
            standard = {name: origin for name, origin in standard.items() if name not in tested}
    return Names(frozenset(program), frozenset(program & called), standard)


def imported(tests: str) -> frozenset[str]:
    """Top-level modules that test code imports, except in a ``try``, which may do without. Raises ``SyntaxError``."""
    nodes: list[ast.AST] = [ast.parse(tests)]
    packages: set[str] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
        elif not isinstance(node, ast.Try):
            nodes += ast.iter_child_nodes(node)
    return frozenset(packages)


def is_dunder(name: str) -> bool:
    return name.startswith("__")


def _free(module: symtable.SymbolTable) -> set[str]:
    """Names that some scope reads as a global and the module never binds."""
    scopes, read, bound = [module], set(), set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            at_top = scope is module
            binds = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if binds and (at_top or symbol.is_declared_global()):
                bound.add(symbol.get_name())
            elif symbol.is_referenced() and (at_top or symbol.is_global()):
                read.add(symbol.get_name())
    return read - bound


def _uses(tree: ast.AST) -> tuple[set[str], set[str], set[str]]:
    """Names that are called, names called with another call as argument, and names with an attribute access."""
    called, wrapping, bases = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
            inner = (each for argument in (*node.args, *node.keywords) for each in ast.walk(argument))
            if any(isinstance(each, ast.Call) and isinstance(each.func, ast.Name) for each in inner):
                wrapping.add(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases.add(node.value.id)
    return called, wrapping, bases
