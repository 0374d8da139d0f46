r"""Compare parsed answers: collections by their elements, relations by their sides, scalars by their values.

Constants are equal if they agree to 1,080 digits, expressions if they agree to 280 digits at random points of the real
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
    SET_OPERATIONS,
    Decimal,
    Group,
    LargePower,
    NotMathematicsError,
    Relation,
    parse,
)
from coca_mindspeed.grading.math.plain import DOUBLE_DIGITS, ROUNDED, terminates
from coca_mindspeed.grading.verdict import Outcome

Point = dict[Any, Any]
_DIGITS, _DIGITS_AT_POINTS, _SPARE_DIGITS = 1_100, 300, 20  # computed: of constants, at each point; not compared
_POINTS = 12
_MAX_EXPANDED = 20  # largest power of a polynomial that is multiplied out
_GRAIN = (1 << 61) - 1  # denominator of random values
_TURNED = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}


def compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    """Compare the bodies of a gold answer and an answer."""
    try:
        gold = parse(pair[0])
        problem = "it says nothing" if _says_nothing(gold) else ""
    except NotMathematicsError as error:
        problem = f"it cannot be parsed as mathematics: {error}"
    if problem:
        return Outcome.UNGRADABLE, f"the gold answer cannot be used: {problem}"
    try:
        return (Outcome.RIGHT if same(gold, parse(pair[1])) else Outcome.WRONG), ""
    except NotMathematicsError as error:
        return Outcome.WRONG, f"the answer cannot be parsed as mathematics: {error}"


def _says_nothing(gold: Any) -> bool:
    """Whether a gold answer has no value, or holds or fails whatever its symbols are."""
    if isinstance(gold, Group):
        return any(map(_says_nothing, gold.items))
    if isinstance(gold, sympy.Expr):
        return bool(gold.has(sympy.zoo, sympy.nan))
    sides = _sides(gold) if isinstance(gold, Relation) else ()
    return (
        len(sides) == 2 and all(isinstance(side, sympy.Expr) for side in sides) and not _symbols([sides[0] - sides[1]])
    )


def same(gold: Any, answer: Any) -> bool:
    gold, answer = (_single(side) for side in (gold, answer))
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relations(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        gold, answer = (_value(side) if isinstance(side, Relation) else side for side in (gold, answer))
        return gold is not None and answer is not None and same(gold, answer)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_groups(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_sets(gold, answer)
    return same_scalar(gold, answer)


def _single(node: Any) -> Any:
    r"""The element of ``\{2\}`` or ``x \in \{2\}``."""
    return node.items[0] if isinstance(node, Group) and len(node.items) == 1 and node.opened in ("", r"\{") else node


def _same_groups(gold: Group, answer: Group) -> bool:
    """A list is compared in any order if it is the gold answer, or if that is a set; as an answer it may be a point."""
    wanted, given = gold.opened + gold.closed, answer.opened + answer.closed
    if wanted in SET_OPERATIONS or given in SET_OPERATIONS:
        alike = wanted == given != r"\setminus" and _in_any_order(gold.items, answer.items)
        return alike or _same_sets(gold, answer)
    if wanted in ("", r"\{\}") and given in ("", r"\{\}") and not (_names(gold) > 1 and _names(answer) == 0):
        return _in_any_order(gold.items, answer.items)
    in_order = len(gold.items) == len(answer.items) and all(map(same, gold.items, answer.items))
    return in_order and (wanted == given or {wanted, given} == {"", "()"})


def _names(group: Group) -> int:
    return len({item.name for item in group.items if isinstance(item, Relation)})


def _in_any_order(golds: Sequence[Any], answers: Sequence[Any], same_item: Callable[[Any, Any], bool] = same) -> bool:
    left = list(answers)
    for gold in golds:
        place = next((n for n, answer in enumerate(left) if same_item(gold, answer)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_sets(gold: Any, answer: Any) -> bool:
    wanted, given = _as_set(gold), _as_set(answer)
    if wanted is None or given is None:
        return False
    return wanted == given or wanted.symmetric_difference(given).is_empty is True


def _as_set(node: Any) -> sympy.Set | None:
    """The set of real numbers that a value, a group or an inequality describes."""
    if isinstance(node, Relation):
        node = _interval(node)
    if isinstance(node, sympy.Expr):
        return sympy.FiniteSet(node)
    if not isinstance(node, Group) or node.opened not in ("", "(", "[", r"\{", *SET_OPERATIONS):
        return None
    if node.opened in SET_OPERATIONS:
        parts = [_as_set(part) for part in node.items]
        unknowns = {_unknown(part) for part in node.items if isinstance(part, Relation)}
        if None in parts or len(unknowns) > 1:
            return None
        if node.opened == r"\setminus":
            return sympy.Complement(parts[0], sympy.Union(*parts[1:]))
        return (sympy.Union if node.opened == r"\cup" else sympy.Intersection)(*parts)
    items = [item.value if isinstance(item, Decimal) else item for item in node.items]
    if not all(isinstance(item, sympy.Expr) for item in items):
        return None
    if node.opened in (r"\{", ""):
        return sympy.FiniteSet(*items)
    if len(items) != 2 or not all(item.is_extended_real for item in items):
        return None
    return sympy.Interval(*items, node.opened == "(", node.closed == ")")


def _sides(relation: Relation) -> tuple[Any, ...]:
    """The sides as expressions; the left one is parsed only here if it is a name."""
    left = parse(relation.name) if relation.name else relation.sides[0]
    return tuple(side.value if isinstance(side, Decimal) else side for side in (left, *relation.sides[1:]))


def _value(relation: Relation) -> Any | None:
    """Return the value that a relation states: 6 for ``x = 6``, ``f(2) = 6``, ``2 + 4 = 6``; None for ``2x = 6``."""
    if set(relation.signs) != {"="}:
        return _interval(relation)
    left, *values = relation.sides
    if not all(same(value, values[-1]) for value in values[:-1]):
        return None
    calculated = isinstance(left, sympy.Expr | Decimal) and not getattr(left, "free_symbols", None)
    named = relation.name or len(values) > 1
    return values[-1] if named or (calculated and same(left, values[-1])) else None


def _same_relations(gold: Relation, answer: Relation) -> bool:
    equations = [set(relation.signs) == {"="} for relation in (gold, answer)]
    if all(equations) and gold.name and gold.name == answer.name:
        wanted, given = _value(gold), _value(answer)
        return wanted is not None and given is not None and same(wanted, given)
    return equations[0] == equations[1] and _in_any_order(list(_steps(gold)), list(_steps(answer)), _same_step)


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
    sides, signs, unknown = list(_sides(relation)), list(relation.signs), _unknown(relation)
    if set(signs) <= {">", r"\ge"}:
        sides, signs = sides[::-1], [_TURNED[sign] for sign in reversed(signs)]
    ends = [end for end in sides if end is not unknown]
    if (
        not set(signs) <= {"<", r"\le"}
        or not getattr(unknown, "is_Symbol", False)
        or not 0 < len(ends) == len(signs) < 3
    ):
        return None
    low, high = ([-sympy.oo, *ends] if sides[0] is unknown else [*ends, sympy.oo])[:2]
    if any(unknown in end.free_symbols for end in ends):
        return None
    closed = signs[-1] == r"\le" and high != sympy.oo
    return Group("[" if signs[0] == r"\le" and low != -sympy.oo else "(", (low, high), "]" if closed else ")")


def _unknown(relation: Relation) -> Any:
    """The symbol between the bounds of an inequality."""
    sides = _sides(relation)
    return sides[1] if len(sides) == 3 or not getattr(sides[0], "is_Symbol", False) else sides[0]


def same_scalar(gold: Any, answer: Any) -> bool:
    """Whether two expressions are equal; a decimal may be rounded only if it is the gold answer."""
    a, b = (side.value if isinstance(side, Decimal) else side for side in (gold, answer))
    infinite = (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr) or a.has(*infinite) or b.has(*infinite):
        return bool(a == b) and not a.has(sympy.zoo, sympy.nan)
    return bool(a == b) or _rounded(gold, answer) or _vanishes(a - b, [a, b])


def _rounded(gold: Any, answer: Any) -> bool:
    """Whether one side is a decimal of the other, which has no finite decimal form."""
    decimal, exact = (gold, answer) if isinstance(gold, Decimal) else (answer, gold)
    if (
        not isinstance(decimal, Decimal)
        or isinstance(exact, Decimal)
        or not exact.is_extended_real
        or exact.free_symbols
    ):
        return False
    if exact.is_Rational and terminates(Fraction(int(exact.p), int(exact.q))):
        return False
    if decimal is answer and decimal.digits < DOUBLE_DIGITS:
        return False
    error = ROUNDED if decimal is gold else Fraction(1, 10 ** (DOUBLE_DIGITS - 1))
    with mpmath.workdps(30):
        distance = abs(_number(exact, {}) - _number(decimal.value, {}))
        return bool(distance <= abs(_number(decimal.value, {})) * error.numerator / error.denominator)


def _symbols(sides: Sequence[sympy.Expr]) -> list[Any]:
    return sorted({symbol for side in sides for symbol in side.free_symbols}, key=str)


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
    found = {_agree(sides, terms, point, _DIGITS_AT_POINTS) for point in _points(sides, "".join(map(str, sides)))}
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
        distance = abs(others[0] - last if others else last)
        agree = bool(distance <= size * mpmath.mpf(10) ** (_SPARE_DIGITS - digits))
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
    sympy.Pow: mpmath.power, LargePower: mpmath.power,
    sympy.Abs: abs, sympy.factorial2: mpmath.fac2, sympy.Max: max, sympy.Min: min,
}  # fmt: skip


def _points(sides: Sequence[sympy.Expr], seed: str) -> Iterator[Point]:
    """Random values of all symbols, of every combination of sizes and signs; some beyond all numbers in the sides."""
    draw = random.Random(hashlib.sha256(seed.encode()).digest())
    far = 4 * min(max([3, *(abs(float(n)) for side in sides for n in side.atoms(sympy.Rational))]), 1e9)
    for n in range(_POINTS):
        low, high = ((0, 1), (0, 3), (far / 2, far))[n % 3]
        yield {
            symbol: sympy.Rational(int((low + (high - low) * draw.random()) * _GRAIN), _GRAIN)
            * (1 if n < 3 else -1 if n < 6 else draw.choice((-1, 1)))
            for symbol in _symbols(sides)
        }
