"""Symbolic comparison of two final answers. Runs in worker processes only: sympy may hang or exhaust memory.

Scalars are compared by :mod:`.equality`; collections, intervals, equations and inequalities by their parts. The time is
limited by :mod:`coca_mindspeed.grading.workers`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

from coca_mindspeed.grading.math.equality import equal, has_long_power
from coca_mindspeed.grading.math.latex import parse_latex, with_imaginary_unit
from coca_mindspeed.grading.math.quantity import DECIMAL_TOLERANCE, read_answer, same_number
from coca_mindspeed.grading.verdict import Outcome

# 0.333333 is exactly one millionth from 1/3: slightly more than the tolerance, for rounding at 40 digits.
_ROUNDING = sympy.Rational(DECIMAL_TOLERANCE) * (1 + sympy.Rational(1, 10**20))
# The parser ignores these: 5' and 5\\ldots would both be 5.
_DROPPED = re.compile(r"""(?<![a-zA-Z}_])['"]|\?|\\[lc]?dots[a-z]?(?![a-zA-Z])|\.\.\.""")
# In these lists a comma does not separate elements, or something else does.
_SEVERAL = re.compile(r"\\pm|\\mp|[(\[]|(?<![a-z])(?:or|and)(?![a-z])")


def gold_problem(text: str) -> str:
    gold = parse_latex(text)
    if gold is None:
        return "it cannot be parsed as mathematics"
    if isinstance(gold, sympy.Expr) and gold.has(sympy.zoo, sympy.nan):
        return "it has no value"
    elements = gold.args if isinstance(gold, sympy.FiniteSet) else (gold,)
    if any(_is_settled(part) for element in elements if _is_relation(element) for part in _shortened(element)):
        return "it is an equation or inequality that holds or fails for all values, and says nothing"
    return "it is true or false as it stands, and says nothing" if isinstance(gold, BooleanAtom) else ""


def compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    """Compare ``(gold, answer)``, both LaTeX without units."""
    gold_text, answer_text = pair
    if Counter(_DROPPED.findall(answer_text)) - Counter(_DROPPED.findall(gold_text)):
        return Outcome.WRONG, "it has characters that the parser ignores and the gold answer lacks"
    if problem := gold_problem(gold_text):
        return Outcome.UNGRADABLE, f"the gold answer cannot be used: {problem}"
    gold, answer = parse_latex(gold_text), parse_latex(answer_text)
    if answer is None:
        return Outcome.WRONG, "the answer cannot be parsed as mathematics"
    if (exact := _same_exact_number(gold, gold_text, answer, answer_text)) is not None:
        return (Outcome.RIGHT if exact else Outcome.WRONG), "as exact numbers"
    if _repetitions_differ(gold, gold_text, answer_text):
        return Outcome.WRONG, "the repeated elements differ"
    return (Outcome.RIGHT if _same(gold, answer) else Outcome.WRONG), ""


def _repetitions_differ(gold: Any, gold_text: str, answer_text: str) -> bool:
    """Whether the gold list repeats an element, which the parser's set loses, and the answer differs as a multiset."""
    if not isinstance(gold, sympy.FiniteSet) or _SEVERAL.search(gold_text) or len(gold_text.split(",")) <= len(gold):
        return False
    elements, others = (
        [parse_latex(part) for part in text.strip("\\{} ").split(",")] for text in (gold_text, answer_text)
    )
    return not _paired(elements, others)


def _paired(elements: Sequence[Any], others: Sequence[Any], same: Callable[[Any, Any], bool] | None = None) -> bool:
    left = list(others)
    for element in elements:
        place = next((n for n, other in enumerate(left) if (same or _same)(element, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _exact_value(expression: Any, text: str) -> Fraction | None:
    written = read_answer(text).value
    if written is not None:
        return written
    if not _is_number(expression) or expression.has(sympy.Float) or has_long_power(expression):
        return None
    value = expression.doit()
    return Fraction(int(value.p), int(value.q)) if isinstance(value, sympy.Rational) else None


def _same_exact_number(gold: Any, gold_text: str, answer: Any, answer_text: str) -> bool | None:
    """Compare as rational numbers (2**20 is not 1048576.5); None if one side is anything else."""
    gold_value, answer_value = _exact_value(gold, gold_text), _exact_value(answer, answer_text)
    if gold_value is None or answer_value is None:
        return None
    gold, answer = read_answer(gold_text), read_answer(answer_text)
    return same_number(replace(gold, value=gold_value), replace(answer, value=answer_value))


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _same(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers are the same; a value matches an equation that assigns it."""
    if _is_relation(gold) and _is_relation(answer):
        return _same_relations(gold, answer)
    if _is_relation(gold):
        named = _value_named(gold)
        if isinstance(answer, sympy.Set) and (solutions := _solutions(gold)) is not None:
            return _same(solutions, answer)
        return named is not None and _same(named, answer)
    if _is_relation(answer):
        if (named := _value_named(answer)) is not None:
            return _same(gold, named)
        solutions = _solutions(answer) if isinstance(gold, sympy.Set) and not _has_equation(answer) else None
        return solutions is not None and _same(gold, solutions)
    if isinstance(gold, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(answer, sympy.MatrixBase | sympy.MatrixExpr):
        return _same_matrices(gold, answer)
    if isinstance(gold, sympy.Set | sympy.Tuple) or isinstance(answer, sympy.Set | sympy.Tuple):
        return _same_collections(gold, answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_scalars(gold, answer)
    return False


def _same_scalars(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    gold, answer = (with_imaginary_unit(side) for side in (gold, answer))
    if (name := _letters(gold)) is not None and name == _letters(answer):
        return True
    # A decimal may be rounded if it is the whole number; in 0.5x it is exact.
    numbers = not gold.free_symbols and not answer.free_symbols
    rounded = numbers and any(side.has(sympy.Float) and side.doit().is_Float for side in (gold, answer))
    return bool(equal(gold, answer, _ROUNDING if rounded else None))


def _letters(expression: sympy.Expr) -> str | None:
    r"""``AB`` of ``\text{AB}`` and of the product A B."""
    factors = sympy.Mul.make_args(expression)
    if not all(factor.is_Symbol or factor == sympy.E for factor in factors):
        return None
    return "".join(factor.name if factor.is_Symbol else "e" for factor in factors)


def _same_matrices(gold: Any, answer: Any) -> bool:
    gold, answer = gold.doit(), answer.doit()
    if not isinstance(gold, sympy.MatrixBase) or not isinstance(answer, sympy.MatrixBase):
        return bool(gold == answer)
    return gold.shape == answer.shape and all(map(_same, gold.flat(), answer.flat()))


def _same_collections(gold: Any, answer: Any) -> bool:
    if isinstance(answer, sympy.FiniteSet) and len(answer) == 1 and isinstance(gold, sympy.Expr):
        return _same(gold, answer.args[0])
    if isinstance(gold, sympy.FiniteSet):
        if (others := _in_order(answer)) is None:
            others = None if isinstance(answer, sympy.Set) else (answer,)
        return others is not None and _same_elements(gold, others)
    if isinstance(gold, sympy.Tuple) or isinstance(answer, sympy.Tuple | sympy.FiniteSet):
        elements, others = _in_order(gold), _in_order(answer)
        if elements is None or others is None:
            return False
        return len(elements) == len(others) and all(map(_same, elements, others))
    return isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set) and _same_sets(gold, answer)


def _in_order(collection: Any) -> Sequence[Any] | None:
    """The elements of a tuple or list as written; an open interval may be a point. None if it is anything else."""
    if isinstance(collection, sympy.Tuple):
        return tuple(collection.args)
    if isinstance(collection, sympy.FiniteSet):
        return tuple(getattr(collection, "_unsorted_args", collection.args))
    if isinstance(collection, sympy.Interval) and collection.left_open and collection.right_open:
        return collection.start, collection.end
    return None


def _same_elements(gold: sympy.FiniteSet, others: Sequence[Any]) -> bool:
    """Whether two lists have the same elements in any order; named values may lack their names only in order."""
    names = [_name(element) for element in gold.args]
    if len(set(names)) > 1 and None not in names and not all(map(_is_relation, others)):
        elements = _in_order(gold) or ()
        return len(elements) == len(others) and all(map(_same, elements, others))
    return all(any(_same(element, other) for other in others) for element in gold.args) and all(
        any(_same(element, other) for element in gold.args) for other in others
    )


def _name(element: Any) -> Any:
    return element.lhs if isinstance(element, sympy.Eq) and _names_a_value(element.lhs) else None


def _same_sets(gold: sympy.Set, answer: sympy.Set) -> bool:
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        kinds = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return kinds and _same(gold.start, answer.start) and _same(gold.end, answer.end)
    gold, answer = gold.doit(), answer.doit()
    if gold == answer:
        return True
    if isinstance(gold, sympy.Union) and isinstance(answer, sympy.Union) and _paired(gold.args, answer.args):
        return True
    return gold.symmetric_difference(answer).is_empty is True


def _is_relation(expression: Any) -> bool:
    return isinstance(expression, Relational | sympy.And)


def _has_equation(relation: Any) -> bool:
    return any(isinstance(part, sympy.Eq) for part in _parts(relation))


def _parts(relation: Any) -> Sequence[Any]:
    """The relations of a chain such as ``1 < x < 2``, as written."""
    if isinstance(relation, sympy.And):
        return tuple(getattr(relation, "_unsorted_args", relation.args))
    return (relation,)


def _names_a_value(left: Any) -> bool:
    return bool(is_expr_of_only_symbols(left)) or isinstance(left, AppliedUndef)


def _chain(relation: Any) -> sympy.Eq | None:
    """``x = b`` of ``x = a = b`` if a equals b, else None; ``x = y = z`` is a system."""
    parts = _parts(relation)
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    if not all(_same(part.lhs, part.rhs) for part in parts[1:]):
        return None
    return parts[0] if len(parts) == 1 else sympy.Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)


def _shortened(relation: Any) -> Sequence[Any]:
    """The parts of a relation; a chain of equal values is one equation."""
    return _parts(relation) if (chain := _chain(relation)) is None else (chain,)


def _value_named(relation: Any) -> Any | None:
    """6 of ``x = 6``, ``f(2) = 6`` and ``2 + 4 = 6``; None for ``2x = 6`` or ``5 = 6``."""
    equation = _chain(relation)
    if equation is None:
        return None
    if _names_a_value(equation.lhs):
        return equation.rhs
    return equation.rhs if _is_number(equation.lhs) and _same(equation.lhs, equation.rhs) else None


def _solutions(relation: Any) -> sympy.Set | None:
    if len(relation.free_symbols) != 1 or not all(isinstance(side, sympy.Expr) for side in _sides(_parts(relation))):
        return None
    try:
        return relation.as_set()
    except NotImplementedError:
        return None


def _sides(relations: Iterable[Any]) -> list[Any]:
    return [side for relation in relations for side in relation.args]


def _same_relations(gold: Any, answer: Any) -> bool:
    golds, answers = _shortened(gold), _shortened(answer)
    if len(golds) == len(answers) == 1 and isinstance(golds[0], sympy.Eq) and isinstance(answers[0], sympy.Eq):
        return _same_equations(golds[0], answers[0])
    if _paired(golds, answers, _same_relation):
        return True
    if _has_equation(gold) or _has_equation(answer) or gold.free_symbols != answer.free_symbols:
        return False
    wanted, given = _solutions(gold), _solutions(answer) if _solutions(gold) is not None else None
    return wanted is not None and given is not None and _same(wanted, given)


def _same_relation(gold: Any, answer: Any) -> bool:
    """Whether two relations differ only by terms moved across the sign or by a factor."""
    (wanted, left), (given, right) = _oriented(gold), _oriented(answer)
    if wanted is not given or left is None or right is None:
        return False
    factor = _factor(left, right)
    return factor is not None and (wanted in (sympy.Eq, sympy.Ne) or factor > 0)


def _oriented(relation: Any) -> tuple[type, Any | None]:
    """The kind of a relation with the greater side on the left, and left minus right."""
    left, right = relation.args
    kind = type(relation)
    if kind in (sympy.StrictLessThan, sympy.LessThan):
        left, right = right, left
        kind = sympy.StrictGreaterThan if kind is sympy.StrictLessThan else sympy.GreaterThan
    return kind, _difference(left, right)


def _difference(left: Any, right: Any) -> Any | None:
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return None
    return sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False)


def _factor(a: sympy.Expr, b: sympy.Expr) -> sympy.Number | None:
    """The number c != 0 with a = c b for all values of the symbols, or None."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for values in (range(3, 3 + 2 * len(symbols), 2), range(-5, -5 - 3 * len(symbols), -3)):
        point = {symbol: sympy.Rational(value, 7) for symbol, value in zip(symbols, values, strict=True)}
        first, second = (side.subs(point) for side in (a, b))
        ratio = sympy.N(first / second) if not equal(second, sympy.S.Zero) else sympy.nan
        if isinstance(ratio, sympy.Number) and ratio.is_finite and ratio != 0:
            return ratio if equal(sympy.Mul(a, second), sympy.Mul(b, first)) else None
    return None


def _same_equations(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    if not all(isinstance(side, sympy.Expr) for side in _sides((gold, answer))):
        return _same(gold.lhs, answer.lhs) and _same(gold.rhs, answer.rhs)
    named = gold.lhs if gold.lhs == answer.lhs and isinstance(gold.lhs, sympy.Symbol | AppliedUndef) else None
    if named is not None and not (gold.rhs.has(named) or answer.rhs.has(named)):
        return _same(gold.rhs, answer.rhs)
    return _same_relation(gold, answer) or _same_roots(gold, answer)


def _same_roots(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Whether two equations, solved for one symbol, have the same solutions."""
    functions = [{function.func for function in side.atoms(AppliedUndef)} for side in (gold, answer)]
    if gold.free_symbols != answer.free_symbols or functions[0] != functions[1] or _is_settled(answer):
        return False
    for symbol in sorted(gold.free_symbols, key=str):
        try:
            wanted, given = (sympy.solve(side.lhs - side.rhs, symbol) for side in (gold, answer))
        except NotImplementedError:
            continue
        if wanted and given:
            return _same_elements(sympy.FiniteSet(*wanted), given)
    return False


def _is_settled(relation: Any) -> bool:
    """Whether a relation holds or fails for all values of its symbols: ``x = x``, ``1 < 2``, ``x = x + 1``."""
    difference = _difference(*relation.args)
    if difference is None:
        return bool(relation.args[0] == relation.args[1])
    if not difference.free_symbols:
        return not difference.has(AppliedUndef)
    point = {symbol: sympy.Rational(n + 3, 7) for n, symbol in enumerate(sorted(difference.free_symbols, key=str))}
    return equal(difference, difference.subs(point)) is True
