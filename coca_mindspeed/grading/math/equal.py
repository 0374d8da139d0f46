r"""Compare parsed answers: collections by their elements, relations by their sides, scalars by their values.

Constants are equal if they agree to 1,000 digits, expressions if they agree to 280 digits at random points of the real
domain of either. The points are drawn from the pair, so a verdict is a function of the pair, and no answer can be
fitted to them. Runs in worker processes only: sympy may hang or exhaust memory.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

from coca_mindspeed.grading.math.parse import (
    Decimal,
    Group,
    Matrix,
    NotMathematicsError,
    Relation,
    SetOperation,
    parse,
)
from coca_mindspeed.grading.math.plain import DOUBLE_DIGITS, ROUNDED, terminates
from coca_mindspeed.grading.verdict import Outcome

Point = dict[Any, Any]
_DIGITS, _DIGITS_AT_POINTS = 1_100, 300  # that a difference has to vanish to: of constants, and at each point
_POINTS = 12
_MAX_EXPANDED = 20  # largest power of a polynomial that is multiplied out
_GRAIN = (1 << 61) - 1  # denominator of random values
_INFINITE = (sympy.oo, -sympy.oo)
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_KINDS = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne}


def compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    """Compare the bodies of a gold answer and an answer."""
    try:
        gold = parse(pair[0])
        problem = _says_nothing(gold)
    except NotMathematicsError as error:
        problem = f"it cannot be parsed as mathematics: {error}"
    if problem:
        return Outcome.UNGRADABLE, f"the gold answer cannot be used: {problem}"
    try:
        return (Outcome.RIGHT if same(gold, parse(pair[1])) else Outcome.WRONG), ""
    except NotMathematicsError as error:
        return Outcome.WRONG, f"the answer cannot be parsed as mathematics: {error}"


def _says_nothing(gold: Any) -> str:
    if isinstance(gold, sympy.Expr) and gold.has(sympy.zoo, sympy.nan):
        return "it has no value"
    if isinstance(gold, Group):
        return next(filter(None, map(_says_nothing, gold.items)), "")
    if not isinstance(gold, Relation) or len(gold.sides) > 2:
        return ""
    sides = _sides(gold)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return ""
    difference = sides[0] - sides[1]
    symbols = sorted(difference.free_symbols, key=str)
    elsewhere = {symbol: sympy.Rational(n + 3, 7) for n, symbol in enumerate(symbols)}
    if not difference.has(AppliedUndef) and same_scalar(difference, difference.xreplace(elsewhere)):
        return "it holds or fails for all values, and says nothing"
    return ""


def same(gold: Any, answer: Any) -> bool:
    gold, answer = (_single(side) for side in (gold, answer))
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relations(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        if not isinstance(gold, Matrix) or not isinstance(answer, Matrix) or len(gold.rows) != len(answer.rows):
            return False
        return all(map(_in_order, gold.rows, answer.rows))
    if isinstance(gold, SetOperation | sympy.Set) or isinstance(answer, SetOperation | sympy.Set):
        return _same_sets(gold, answer)
    if isinstance(gold, Group):
        return isinstance(answer, Group) and _same_groups(gold, answer)
    return not isinstance(answer, Group) and same_scalar(gold, answer)


def _single(node: Any) -> Any:
    r"""The element of ``\{2\}`` or ``x \in \{2\}``."""
    return node.items[0] if isinstance(node, Group) and len(node.items) == 1 and node.opened in ("", r"\{") else node


def _same_groups(gold: Group, answer: Group) -> bool:
    """A list is compared in any order if it is the gold answer, or if that is a set; as an answer it may be a point."""
    wanted, given = gold.opened + gold.closed, answer.opened + answer.closed
    if wanted in ("", r"\{\}") and given in ("", r"\{\}", "()") and not _named_apart(gold, answer):
        return (given != "()" or wanted == "") and _in_any_order(gold.items, answer.items)
    return (wanted == given or (given == "" and wanted == "()") or wanted == "") and _in_order(gold.items, answer.items)


def _named_apart(gold: Group, answer: Group) -> bool:
    """Whether the gold answer names its values (x = 1, y = 2) and the answer does not: then their order counts."""
    names = [item.name if isinstance(item, Relation) else None for item in gold.items]
    return len(set(names)) > 1 and None not in names and not any(isinstance(item, Relation) for item in answer.items)


def _in_order(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    return len(golds) == len(answers) and all(map(same, golds, answers))


def _in_any_order(golds: Sequence[Any], answers: Sequence[Any], same_item: Callable[[Any, Any], bool] = same) -> bool:
    left = list(answers)
    for gold in golds:
        place = next((n for n, answer in enumerate(left) if same_item(gold, answer)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_sets(gold: Any, answer: Any) -> bool:
    operations = isinstance(gold, SetOperation) and isinstance(answer, SetOperation) and gold.sign == answer.sign
    if operations and gold.sign != r"\setminus" and _in_any_order(gold.parts, answer.parts):
        return True
    wanted, given = _as_set(gold), _as_set(answer)
    if wanted is None or given is None:
        return False
    return wanted == given or wanted.symmetric_difference(given).is_empty is True


def _as_set(node: Any) -> sympy.Set | None:
    """The set of real numbers that a group, an operation or a condition describes."""
    if isinstance(node, sympy.Set):
        return node
    if isinstance(node, SetOperation):
        parts = [_as_set(part) for part in node.parts]
        if any(part is None for part in parts) or len(_unknowns(node)) > 1:
            return None
        if node.sign == r"\setminus":
            return sympy.Complement(parts[0], sympy.Union(*parts[1:]))
        return (sympy.Union if node.sign == r"\cup" else sympy.Intersection)(*parts)
    if isinstance(node, Relation):
        interval = _interval(node)
        return _solutions(node) if interval is None else _as_set(interval)
    if not isinstance(node, Group):
        return sympy.FiniteSet(node) if isinstance(node, sympy.Expr) else None
    items = [item.value if isinstance(item, Decimal) else item for item in node.items]
    if not all(isinstance(item, sympy.Expr) for item in items):
        return None
    if node.opened in (r"\{", ""):
        return sympy.FiniteSet(*items)
    if len(items) != 2 or not all(item.is_extended_real for item in items):
        return None
    return sympy.Interval(*items, node.opened == "(", node.closed == ")")


def _unknowns(node: SetOperation) -> set[Any]:
    sides = [side for part in node.parts if isinstance(part, Relation) for side in _sides(part)]
    return {symbol for side in sides for symbol in getattr(side, "free_symbols", ())}


def _sides(relation: Relation) -> tuple[Any, ...]:
    """The sides as expressions; the left one is parsed only here if it is a name."""
    left = parse(relation.name) if relation.named else relation.sides[0]
    return tuple(side.value if isinstance(side, Decimal) else side for side in (left, *relation.sides[1:]))


def _is_equation(node: Any) -> bool:
    return isinstance(node, Relation) and set(node.signs) == {"="}


def _named(relation: Relation) -> Any | None:
    """6 of ``x = 6``, ``f(2) = 6`` and ``2 + 4 = 6``; None for ``2x = 6`` or ``5 = 6``; of a chain the last value."""
    if not _is_equation(relation):
        return None
    values = relation.sides[1:]
    if not all(same(value, values[-1]) for value in values[:-1]):
        return None
    if relation.named or len(values) > 1:
        return values[-1]
    left = relation.sides[0]
    calculated = isinstance(left, sympy.Expr | Decimal) and not getattr(left, "free_symbols", None)
    return values[-1] if calculated and same(left, values[-1]) else None


def _same_relations(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if _is_equation(gold) or _is_equation(answer):
            return _is_equation(gold) and _is_equation(answer) and _same_equations(gold, answer)
        return _in_any_order(list(_steps(gold)), list(_steps(answer)), _same_step) or _same_sets(gold, answer)
    relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
    if (value := _named(relation)) is not None:
        return same(value, other) if relation is gold else same(other, value)
    if _is_equation(relation) or not isinstance(other, Group | SetOperation | sympy.Set):
        return False
    interval = _interval(relation)
    return _same_groups(interval, other) if interval and isinstance(other, Group) else _same_sets(gold, answer)


def _same_equations(gold: Relation, answer: Relation) -> bool:
    if gold.named and gold.name == answer.name:
        wanted, given = _named(gold), _named(answer)
        return wanted is not None and given is not None and same(wanted, given)
    if len(gold.sides) > 2 or len(answer.sides) > 2:
        return len(gold.sides) == len(answer.sides) and _in_order(_sides(gold), _sides(answer))
    return _same_step(next(_steps(gold)), next(_steps(answer)))


def _steps(relation: Relation) -> Iterator[tuple[str, Any]]:
    """Sign and difference of each step, with the greater side first."""
    sides = _sides(relation)
    for left, sign, right in zip(sides, relation.signs, sides[1:], strict=False):
        if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
            raise NotMathematicsError("a relation between collections")
        turned = sign in ("<", r"\le")
        yield (_TURNED[sign], right - left) if turned else (sign, left - right)


def _same_step(gold: tuple[str, Any], answer: tuple[str, Any]) -> bool:
    """Whether two relations differ only by terms moved across the sign or by a factor, positive for an inequality."""
    (wanted, left), (given, right) = gold, answer
    if wanted != given or left.free_symbols != right.free_symbols:
        return False
    for point in _points([left, right], "step"):
        values = [side.subs(point) for side in (left, right)]
        if all(value.is_finite and value.is_real and not same_scalar(value, sympy.S.Zero) for value in values):
            factor = values[0] / values[1]
            return (wanted in ("=", r"\ne") or factor.is_positive is True) and same_scalar(left, factor * right)
    return False


def _interval(relation: Relation) -> Group | None:
    r"""``(2, 5]`` of ``2 < x \le 5``; the ends may be any expressions."""
    sides, signs = list(_sides(relation)), list(relation.signs)
    if signs and set(signs) <= {">", r"\ge"}:
        sides, signs = sides[::-1], [_TURNED[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", r"\le"} or len(signs) > 2:
        return None
    place = 1 if len(signs) == 2 else int(not sides[0].is_Symbol)
    ends = [end for end in sides if end is not sides[place]]
    if not sides[place].is_Symbol or any(end.free_symbols - {sides[place]} or end.has(sides[place]) for end in ends):
        return None
    low, high = (sides[0] if place else -sympy.oo), (sides[-1] if place + 1 < len(sides) else sympy.oo)
    opened = "[" if place and signs[0] == r"\le" else "("
    return Group(opened, (low, high), "]" if high != sympy.oo and signs[-1] == r"\le" else ")")


def _solutions(relation: Relation) -> sympy.Set | None:
    sides = _sides(relation)
    if _is_equation(relation) or "=" in relation.signs or not all(isinstance(side, sympy.Expr) for side in sides):
        return None
    if len({symbol for side in sides for symbol in side.free_symbols}) != 1:
        return None
    try:
        parts = [_KINDS[sign](*sides[n : n + 2]) for n, sign in enumerate(relation.signs)]
        return sympy.Intersection(*(part.as_set() for part in parts))
    except (NotImplementedError, AttributeError, TypeError):
        return None


def same_scalar(gold: Any, answer: Any) -> bool:
    """Whether two expressions are equal; a decimal may be rounded only if it is the gold answer."""
    a, b = (side.value if isinstance(side, Decimal) else side for side in (gold, answer))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    if a in _INFINITE or b in _INFINITE:
        return bool(a == b)
    if a.has(sympy.zoo, sympy.nan, sympy.oo) or b.has(sympy.zoo, sympy.nan, sympy.oo):
        return False
    if a == b:
        return True
    if not a.free_symbols and not b.free_symbols and _rounded(gold, answer):
        return True
    return _vanishes(a - b, [a, b])


def _rounded(gold: Any, answer: Any) -> bool:
    decimal, exact = (gold, answer) if isinstance(gold, Decimal) else (answer, gold)
    if not isinstance(decimal, Decimal) or isinstance(exact, Decimal) or not exact.is_extended_real:
        return False
    if exact.is_Rational and terminates(Fraction(int(exact.p), int(exact.q))):
        return False
    if decimal is answer and decimal.digits < DOUBLE_DIGITS:
        return False
    error = ROUNDED if decimal is gold else Fraction(1, 10 ** (DOUBLE_DIGITS - 1))
    with mpmath.workdps(30):
        distance = abs(_number(exact, {}) - _number(decimal.value, {}))
        return bool(distance <= abs(_number(decimal.value, {})) * error.numerator / error.denominator)


def _vanishes(difference: sympy.Expr, sides: Sequence[sympy.Expr]) -> bool:
    calls = {call: sympy.Dummy(real=True) for call in difference.atoms(AppliedUndef)}
    difference, *sides = (each.xreplace(calls) for each in (difference, *sides))
    if not difference.free_symbols:
        terms = sympy.Add.make_args(difference)  # only terms of a sum can cancel
        return len(terms) > 1 and _agree([difference], terms, {}, _DIGITS) is True
    powers = (power.exp for power in difference.atoms(sympy.Pow))
    if difference.is_polynomial() and all(power.is_Integer and power <= _MAX_EXPANDED for power in powers):
        return bool(sympy.expand(difference) == 0)
    terms = [term for side in sides for term in sympy.Add.make_args(side)]
    found = [_agree(sides, terms, point, _DIGITS_AT_POINTS) for point in _points(sides, "".join(map(str, sides)))]
    return True in found and False not in found


def _agree(values: Sequence[Any], terms: Sequence[Any], point: Point, digits: int) -> bool | None:
    """Whether two values, or one and zero, agree relatively to the largest term; None if neither is a real number."""
    with mpmath.workdps(digits):
        try:
            *others, last = [_number(value, point) for value in values]
            size = max(abs(_number(term, point)) for term in terms)
        except (ZeroDivisionError, ValueError, OverflowError, mpmath.NoConvergence):
            return None
        if not mpmath.isfinite(size):
            return None
        agree = bool(abs(others[0] - last if others else last) <= size * mpmath.mpf(10) ** (20 - digits))
        real = point == {} or any(mpmath.im(each) == 0 for each in (*others, last))
        return agree if real or agree or any(value.has(sympy.I) for value in values) else None


def _number(expression: Any, point: Point) -> Any:
    """The value of an expression at a point, to the digits that mpmath works with."""
    if expression in point:
        return _number(point[expression], {})
    if expression.is_Rational:
        return mpmath.mpf(int(expression.p)) / int(expression.q)
    if expression in _CONSTANTS:
        return +_CONSTANTS[expression]
    arguments = [_number(argument, point) for argument in expression.args]
    if expression.func not in _FUNCTIONS:
        raise ValueError(f"{expression.func} has no value")
    return _FUNCTIONS[expression.func](*arguments)


_CONSTANTS = {sympy.pi: mpmath.pi, sympy.E: mpmath.e, sympy.I: mpmath.mpc(0, 1)}
_SAME_NAMES = "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh exp log factorial binomial"
_FUNCTIONS: dict[Any, Any] = {getattr(sympy, name): getattr(mpmath, name) for name in _SAME_NAMES.split()}
_FUNCTIONS |= {
    sympy.Add: lambda *terms: mpmath.fsum(terms), sympy.Mul: lambda *factors: mpmath.fprod(factors),
    sympy.Pow: mpmath.power, sympy.Abs: abs, sympy.factorial2: mpmath.fac2, sympy.Max: max, sympy.Min: min,
}  # fmt: skip


def _points(sides: Sequence[sympy.Expr], seed: str) -> Iterator[Point]:
    """Random values of all symbols, of every combination of sizes and signs; some beyond all numbers in the sides."""
    draw = random.Random(hashlib.sha256(seed.encode()).digest())
    symbols = sorted({symbol for side in sides for symbol in side.free_symbols}, key=str)
    far = 4 * min(max([3, *(abs(float(n)) for side in sides for n in side.atoms(sympy.Rational))]), 1e9)
    for n in range(_POINTS):
        low, high = ((0, 1), (0, 3), (far / 2, far))[n % 3]
        yield {
            symbol: sympy.Rational(int((low + (high - low) * draw.random()) * _GRAIN), _GRAIN)
            * (1 if n < 3 else -1 if n < 6 else draw.choice((-1, 1)))
            for symbol in symbols
        }
