r"""Products of vectors with ``\times``; the scalar product is a product of numbers."""

import itertools
from typing import Any

import sympy


class Vector(sympy.Symbol):
    r"""A symbol for which ``\times`` is no product of numbers."""


_CROSS = r"\times"  # the name of the function


def crossed(first: Any, second: Any) -> Any:
    r"""The product with ``\times``: of two vectors, a function that changes its sign when they are exchanged."""
    sides = [_vector_terms(side) if side.atoms(Vector) else None for side in (first, second)]
    if None in sides:
        return first * second
    terms = itertools.product(*(side or [] for side in sides))
    return sympy.Add(*(x * y * _oriented(v, w) for (x, v), (y, w) in terms))


def _vector_terms(side: Any) -> list[tuple[Any, Any]] | None:
    """Coefficients and vectors of a sum, or None if a term is no multiple of a vector."""
    terms = []
    for term in sympy.Add.make_args(sympy.expand(side)):
        factors = sympy.Mul.make_args(term)
        vectors = [f for f in factors if isinstance(f, Vector) or getattr(f.func, "__name__", "") == _CROSS]
        if len(vectors) != 1:
            return None
        terms.append((term / vectors[0], vectors[0]))
    return terms


def _oriented(first: Any, second: Any) -> Any:
    if first == second:
        return sympy.S.Zero
    in_order = sorted((first, second), key=str)
    return (1 if in_order[0] == first else -1) * sympy.Function(_CROSS, real=True)(*in_order)
