"""LaTeX answers as sympy objects.  Runs in worker processes only."""

import functools
import re
import sys
from typing import Any

import sympy
from math_verify.parser import get_last_eq
from sympy.core.relational import Relational

from coca_mindspeed.grading.mathematics.parser import Parser, normalised

_OR = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])")
# The parser drops the degree sign; inside of a function that turns the angle into radians.
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")

# One of each kind: the parser keeps tables of what it has seen, and the first look at a kind is slow.
_WARM_UP = (
    r"\frac{a+1}{\sqrt{2}}",
    r"3\sqrt{5}",
    r"\frac{2\pi}{3}\cdot 5",
    r"-\frac{3}{2}x+7",
    "x^2+3x-10",
    "(x+2)(x-5)",
    "2^{10}-1",
    "(1, 2)",
    r"(\frac{1}{2}, -\sqrt{3})",
    r"[1, \infty)",
    r"(-\infty, 1) \cup (2, 3]",
    "1, 2, 3",
    r"\{1, 2\}",
    "x=2y",
    "y=3x+4",
    r"1 \le x < 2",
    r"\sin(2x)",
    r"\log_{2} 8",
    r"e^{-x}+3+4i",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
)


def warm_up() -> None:
    """Build the parser's tables before the first clock starts."""
    if hasattr(sys, "set_int_max_str_digits"):  # Python's own guard against long integers; here the pool's limit is one
        sys.set_int_max_str_digits(0)
    for text in _WARM_UP:
        parse_latex(text)


# The samples of a group have one gold answer, and often the same wrong one.
@functools.lru_cache(maxsize=256)
def parse_latex(text: str) -> Any | None:
    """Sympy's reading of a LaTeX answer (a list as a set, a relation as a relation), or None if there is none."""
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    expression = parse_quickly(text)
    if expression is None:
        expression = parse_fully(text)
    if expression is None:
        return None
    expression = _with_imaginary_unit(expression)
    return _union_of_conditions(expression) if _OR.search(text) else expression


def parse_quickly(text: str) -> Any | None:
    """What :func:`parse_fully` would say, or None if the quick way does not get there.

    ANTLR's own advice: predict with less context first, and start again with all of it on a syntax error.
    """
    try:
        return Parser(full=False).parse(normalised(text))
    except Exception:  # noqa: BLE001  # the parser raises plain Exception; the full one decides
        return None


def parse_fully(text: str) -> Any | None:
    """The whole grammar's reading; of a chain of equations that it cannot read, the last right-hand side's."""
    try:
        prepared = normalised(text)
    except ValueError:
        return None
    for part in dict.fromkeys((prepared, get_last_eq(prepared))):
        try:
            return Parser(full=True).parse(part)
        except Exception:  # noqa: BLE001  # as above
            continue
    return None


def _with_imaginary_unit(expression: Any) -> Any:
    """Read the symbol i as the imaginary unit, as answers mean it."""
    # Relations and sets keep their form; xreplace would evaluate them away.
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase):
        return expression
    units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(units) if units else expression


def _union_of_conditions(expression: Any) -> Any:
    """``x < 1 or x > 2``, which the parser reads as a set of two relations, as the set of numbers that it means."""
    if not isinstance(expression, sympy.FiniteSet) or len(expression.free_symbols) != 1:
        return expression
    if not all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in expression.args):
        return expression
    return sympy.Union(*(part.as_set() for part in expression.args))
