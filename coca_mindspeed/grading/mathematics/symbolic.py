"""Symbolic comparison of two final answers.  Runs in worker processes only: sympy can hang or explode.

Where both sides have numeric values (free symbols are given random ones), these decide: they must agree to 25
digits.  math-verify, which decides about everything else (sets, relations, intervals), would round to six decimals and
drop what is below 1e-15, and so take ``e^{-50}`` for ``e^{-51}``; and it would simplify, which is slow.  Its time
limits are signals of the main thread and are off; the pool in :mod:`.workers` kills from outside.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from coca_mindspeed.grading.mathematics.latex import parse_latex
from coca_mindspeed.grading.mathematics.quantity import DECIMAL_TOLERANCE, read_answer, same_number
from coca_mindspeed.grading.verdict import Outcome

_DIGITS = 40
_AGREEMENT = sympy.Float("1e-25", _DIGITS)
# 0.333333 is exactly one part in a million from a third: a hair more than that, for the rounding of 40 digits.
_ROUNDING = sympy.Rational(DECIMAL_TOLERANCE) * (1 + sympy.Rational(1, 10**20))
_NEAR, _FURTHEST = 3, 10**6  # how far from 0 points lie; beyond every number of the two answers, as far as that
# Signs that the parser passes over: 5' and 5_2 and 5\\ldots would all be 5.
_DROPPED = re.compile(r"""['"?]|\\[lc]?dots[a-z]?(?![a-zA-Z])|\.\.\.|\d\s*_""")
# A comma inside of brackets is no separator of elements, and what follows "or" may be one.
_SEVERAL = re.compile(r"\\pm|\\mp|[(\[]|(?<![a-z])(?:or|and)(?![a-z])")
_PRIMES = re.compile(r"(?<=[a-zA-Z])'")
_UNEVALUATED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


def gold_problem(text: str) -> str:
    """Why a gold answer cannot be used, or ``""``."""
    return "" if parse_latex(text) is not None else "it cannot be parsed as mathematics"


def compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    """Compare ``(gold, answer)``, both LaTeX without units, and say why where it is not plain."""
    gold_text, answer_text = pair
    if Counter(_DROPPED.findall(answer_text)) - Counter(_DROPPED.findall(gold_text)):
        return Outcome.WRONG, "it holds what the parser would drop and the gold answer does not have"
    if "=" not in gold_text and len(_PRIMES.findall(gold_text)) != len(_PRIMES.findall(answer_text)):
        return Outcome.WRONG, "another derivative"
    gold = parse_latex(gold_text)
    if gold is None:
        return Outcome.UNGRADABLE, "the gold answer cannot be parsed as mathematics"
    answer = parse_latex(answer_text)
    if answer is None:
        return Outcome.WRONG, "the answer cannot be parsed as mathematics"
    if (exact := _same_exact_number(gold, gold_text, answer, answer_text)) is not None:
        return (Outcome.RIGHT if exact else Outcome.WRONG), "as exact numbers"
    if _repeated(gold, gold_text) and not _same_repetitions(gold_text, answer_text):
        return Outcome.WRONG, "the repeated elements differ"
    if not _is_relation(gold) and _is_relation(answer) and not _states_a_value(answer):
        return Outcome.WRONG, "an equation that does not say what the value is"
    agree = _agree(gold, answer)
    if agree is False:
        return Outcome.WRONG, "the values differ"
    if agree:
        return Outcome.RIGHT, "the values agree"
    # allow_set_relation_comp: x<2 and (-oo, 2) are the same answer, whichever of them is the gold.
    same = verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)
    if not same and (solutions := [_solutions(side) for side in (gold, answer)])[0] is not None:
        same = solutions[0] == solutions[1]
    return (Outcome.RIGHT if same else Outcome.WRONG), ""


def _repeated(gold: Any, text: str) -> bool:
    """Whether a list names an element twice, which the parser's set forgets."""
    return isinstance(gold, sympy.FiniteSet) and not _SEVERAL.search(text) and len(text.split(",")) > len(gold)


def _same_repetitions(gold_text: str, answer_text: str) -> bool:
    sides = [[parse_latex(part) for part in text.strip("\\{} ").split(",")] for text in (gold_text, answer_text)]
    left = sides[1]
    for element in sides[0]:
        place = next((n for n, other in enumerate(left) if other == element or _agree(element, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _is_relation(expression: Any) -> bool:
    return isinstance(expression, Relational | sympy.And)


def _states_a_value(relation: Any) -> bool:
    """Whether math-verify may take the last right-hand side for the answer: of ``x = 6``, but not of ``2x = 6``."""
    parts = getattr(relation, "_unsorted_args", None) or [relation]
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return True  # an inequality, which stands for its set of solutions
    named = is_expr_of_only_symbols(parts[0].lhs) or isinstance(parts[0].lhs, AppliedUndef)
    return all(_agree(part.lhs, part.rhs) is not False for part in parts[1 if named else 0 :]) and (
        named or _is_number(parts[0].lhs)
    )


def _solutions(expression: Any) -> sympy.Set | None:
    """The numbers for which inequalities in one unknown hold, or None if that is not what the expression is."""
    parts = expression.args if isinstance(expression, sympy.And) else (expression,)
    inequalities = all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in parts)
    if not inequalities or len(expression.free_symbols) != 1:
        return None
    try:
        return expression.as_set()
    except NotImplementedError:
        return None


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _exact_value(expression: Any, text: str) -> Fraction | None:
    written = read_answer(text).value
    if written is not None:
        return written
    if not _is_number(expression) or expression.has(sympy.Float):
        return None
    value = expression.doit()
    return Fraction(int(value.p), int(value.q)) if isinstance(value, sympy.Rational) else None


def _same_exact_number(gold: Any, gold_text: str, answer: Any, answer_text: str) -> bool | None:
    """Compare as exact rationals: 2**20 is 1048576 and not 1048576.5, which no tolerance would tell apart."""
    gold_value, answer_value = _exact_value(gold, gold_text), _exact_value(answer, answer_text)
    if gold_value is None or answer_value is None:
        return None
    return same_number(
        replace(read_answer(gold_text), value=gold_value), replace(read_answer(answer_text), value=answer_value)
    )


def _agree(gold: Any, answer: Any) -> bool | None:
    """Whether the two have the same values; None where that cannot be said."""
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        if gold.shape != answer.shape:
            return False
        return _all_agree(zip(gold.flat(), answer.flat(), strict=True))
    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
        return _all_agree(zip(gold, answer, strict=True)) if len(gold) == len(answer) else False
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        if not all(map(_is_number, [*gold.args, *answer.args])):
            return None
        return _each_has_a_partner(gold.args, answer.args) and _each_has_a_partner(answer.args, gold.args)
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        if (gold.left_open, gold.right_open) != (answer.left_open, answer.right_open):
            return False
        return _all_agree([(gold.start, answer.start), (gold.end, answer.end)])
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _equations_agree(gold, answer)
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return None
    return _scalars_agree(gold, answer)


def _equations_agree(gold: sympy.Eq, answer: sympy.Eq) -> bool | None:
    """The cases that need no solving: the same variable given a value, or both sides the same up to the sign."""
    symbol = gold.lhs
    if symbol == answer.lhs and isinstance(symbol, sympy.Symbol):
        if symbol not in gold.rhs.free_symbols | answer.rhs.free_symbols:
            return _agree(gold.rhs, answer.rhs)
        return None
    if not all(isinstance(side, sympy.Expr) for side in (*gold.args, *answer.args)):
        return None
    difference, other = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    return True if _agree(difference, other) or _agree(difference, -other) else None


def _each_has_a_partner(elements: Any, others: Any) -> bool:
    return all(any(element == other or _agree(element, other) for other in others) for element in elements)


def _all_agree(pairs: Any) -> bool | None:
    outcomes = [_agree(a, b) for a, b in pairs]
    return False if False in outcomes else None if None in outcomes else True


def _scalars_agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    symbols = sorted(gold.free_symbols, key=str)
    if set(symbols) != set(answer.free_symbols):
        return None
    sides = [side.doit() if side.has(*_UNEVALUATED) else side for side in (gold, answer)]
    if any(side.has(*_UNEVALUATED) for side in sides):
        return None  # numeric quadrature is not good to 25 digits
    # Only a number that is nothing but a decimal may stand for a value that it cannot write; in 0.5x it is exact.
    rounded = not symbols and any(side.has(sympy.Float) and side.doit().is_Float for side in sides)
    tolerance = _ROUNDING if rounded else _AGREEMENT
    sides = [side.replace(_is_float, lambda value: sympy.Rational(str(value))) for side in sides]
    # The points depend on the pair and on nothing else: a verdict is the same in every batch, and no answer can be
    # made to fit points that follow from its own text.
    draw = random.Random(hashlib.sha256(f"{gold}\0{answer}".encode()).digest())
    compared = False
    for point in _points(symbols, sides, draw):
        a, b = (sympy.N(side.subs(point), _DIGITS) for side in sides)
        if not (_is_finite(a) and _is_finite(b)):
            continue
        compared = True
        if abs(a - b) > tolerance * max(abs(a), abs(b)):
            return False
    return True if compared else None


def _points(symbols: list[Any], sides: list[Any], draw: random.Random) -> Iterator[dict[Any, Any]]:
    """Values for the symbols where two functions that only agree on one side of 0, 5 or each other differ.

    Every symbol is positive and negative, less and greater than every other one, and near and far; ``|x - 5|`` is
    ``5 - x`` as far as 5.
    """
    if not symbols:
        yield {}
        return
    constants = [abs(number) for side in sides for number in side.atoms(sympy.Number) if number.is_finite]
    far = 10 + min(_FURTHEST, max((int(number) for number in constants), default=0))
    alternating = [1 - 2 * (n % 2) for n in range(len(symbols))]
    near_and_far = ((_NEAR, 1, False), (_NEAR, -1, False), (3 * far, 1, True), (3 * far, -1, True))
    for reach, sign, falling in near_and_far:
        yield _point(symbols, [sign] * len(symbols), reach, falling, draw)
    if len(symbols) > 1:
        for sign in (1, -1):
            yield _point(symbols, [sign * one for one in alternating], _NEAR, False, draw)


def _point(symbols: list[Any], signs: list[int], reach: int, falling: bool, draw: random.Random) -> dict[Any, Any]:
    sizes = sorted((draw.randint(336 * reach, 1009 * reach) for _ in symbols), reverse=falling)
    return {symbol: sympy.Rational(sign * size, 1009) for symbol, sign, size in zip(symbols, signs, sizes, strict=True)}


def _is_float(expression: Any) -> bool:
    return bool(expression.is_Float)


def _is_finite(value: Any) -> bool:
    return bool(value.is_number) and all(
        isinstance(part, sympy.Number) and part.is_finite for part in value.as_real_imag()
    )
