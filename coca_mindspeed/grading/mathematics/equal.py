r"""Whether two parsed answers are the same: collections by their elements, relations by their sides, scalars by value.

Scalars are equal if their difference is zero: structurally, or because it vanishes to 1,000 digits at random real points
at which both sides are real. The points are drawn from the pair, so a verdict is a function of the pair, and no answer
can be fitted to them. Runs in worker processes only: sympy may hang or exhaust memory.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from coca_mindspeed.grading.mathematics.parse import (
    Decimal,
    Group,
    Matrix,
    NotMathematicsError,
    Relation,
    SetOperation,
    parse,
)
from coca_mindspeed.grading.verdict import Outcome

_DIGITS, _DIGITS_AT_POINTS = 1_100, 300  # that a difference has to vanish to: of constants, and at each point
_POINTS = 12
_MAX_EXPANDED = 20  # largest power of a polynomial that is multiplied out
_GRAIN = (1 << 61) - 1  # denominator of random values
_ROUNDED = Fraction(1, 10**6)  # relative error of a gold answer that is a rounded decimal
_DOUBLE_DIGITS = 15  # significant digits of a program's output: a decimal that is as good as its exact value
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


def gold_problem(text: str) -> str:
    """Why a gold answer cannot be used, or ``""``."""
    outcome, reason = compare((text, text))
    return reason if outcome is Outcome.UNGRADABLE else ""


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


# ------------------------------------------------------------------------------------------------ collections


def _same_groups(gold: Group, answer: Group) -> bool:
    kinds = gold.opened + gold.closed, answer.opened + answer.closed
    if kinds[0] == kinds[1] or "" in kinds:
        if kinds[0] in ("", r"\{\}") and not _named_apart(gold, answer):
            return _in_any_order(gold.items, answer.items)
        if kinds[1] == r"\{\}" or (kinds[1] == "" and kinds[0] not in ("", "()")):
            return kinds[0] == kinds[1] and _in_any_order(gold.items, answer.items)
        return _in_order(gold.items, answer.items)
    return False


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
        if any(part is None for part in parts) or len(node.parts) > 1 and len(_unknowns(node)) > 1:
            return None
        if node.sign == r"\cup":
            return sympy.Union(*parts)
        return (
            sympy.Intersection(*parts) if node.sign == r"\cap" else sympy.Complement(parts[0], sympy.Union(*parts[1:]))
        )
    if isinstance(node, Relation):
        return _solutions(node)
    if not isinstance(node, Group):
        return None
    items = [item.value if isinstance(item, Decimal) else item for item in node.items]
    if not all(isinstance(item, sympy.Expr) for item in items):
        return None
    if node.opened in (r"\{", ""):
        return sympy.FiniteSet(*items)
    if len(items) != 2 or not all(item.is_extended_real for item in items):
        return None
    return sympy.Interval(*items, node.opened == "(", node.closed == ")")


def _unknowns(node: SetOperation) -> set[Any]:
    relations = [part for part in node.parts if isinstance(part, Relation)]
    return {symbol for part in relations for side in _sides(part) for symbol in getattr(side, "free_symbols", ())}


# ------------------------------------------------------------------------------------------------ relations


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
        if _is_equation(gold) and _is_equation(answer):
            return _same_equations(gold, answer)
        if _is_equation(gold) or _is_equation(answer):
            return False
        if _in_any_order(_steps(gold), _steps(answer), _same_step):
            return True
        return _solutions(gold) is not None and _same_sets(gold, answer)
    relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
    if (value := _named(relation)) is not None:
        return same(value, other) if relation is gold else same(other, value)
    if _is_equation(relation) or not isinstance(other, Group | SetOperation | sympy.Set):
        return False
    solutions = _solutions(relation)
    if solutions is None:
        return False
    interval = _interval(relation)
    if interval is not None and isinstance(other, Group):
        return _same_groups(interval, other)
    return _same_sets(gold, answer)


def _same_equations(gold: Relation, answer: Relation) -> bool:
    if gold.named and answer.named:
        if gold.name == answer.name:
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
    """Whether two relations differ only by terms moved across the sign or by a factor, of an inequality a positive one."""
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
    place = (
        1 if len(signs) == 2 else next((n for n, side in enumerate(sides) if getattr(side, "is_Symbol", False)), None)
    )
    if place is None or not sides[place].is_Symbol:
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
    parts = [_KINDS[sign](*sides[n : n + 2]) for n, sign in enumerate(relation.signs)]
    try:
        return sympy.Intersection(*(part.as_set() for part in parts))
    except (NotImplementedError, AttributeError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------ scalars


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
    if not isinstance(decimal, Decimal) or isinstance(exact, Decimal) or _terminates(exact):
        return False
    if decimal is answer and decimal.digits < _DOUBLE_DIGITS:
        return False
    error = _ROUNDED if decimal is gold else Fraction(1, 10 ** (_DOUBLE_DIGITS - 1))
    distance = abs(sympy.N(exact - decimal.value, 30, maxn=100))
    return bool(distance <= sympy.Rational(error.numerator, error.denominator) * abs(decimal.value))


def _terminates(value: Any) -> bool:
    if not value.is_Rational:
        return False
    denominator = int(value.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _vanishes(difference: sympy.Expr, sides: Sequence[sympy.Expr]) -> bool:
    calls = {call: sympy.Dummy(real=True) for call in difference.atoms(AppliedUndef)}
    difference, *sides = (each.xreplace(calls) for each in (difference, *sides))
    if not difference.free_symbols:
        return _is_zero(difference, {})
    powers = (power.exp for power in difference.atoms(sympy.Pow))
    if difference.is_polynomial() and all(power.is_Integer and power <= _MAX_EXPANDED for power in powers):
        return bool(sympy.expand(difference) == 0)
    complex_zeros = real_zeros = 0
    inherently_complex = any(side.has(sympy.I) for side in sides)
    for point in _points(sides, "".join(map(str, sides))):
        values = [side.evalf(15, subs=point) for side in sides]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        real = [value.is_real is True for value in values]
        zero = _is_zero(difference, point)
        if not zero and (any(real) or inherently_complex):
            return False
        real_zeros += zero and any(real)
        complex_zeros += zero and not any(real)
        if not zero:
            complex_zeros = -_POINTS
    return real_zeros > 0 or complex_zeros > 0


def _is_zero(difference: sympy.Expr, point: dict[Any, Any]) -> bool:
    """Whether no digit of a value can be told from zero."""
    value = difference.evalf(15, subs=point, maxn=_DIGITS_AT_POINTS if point else _DIGITS)
    return value == 0 or all(part == 0 or getattr(part, "_prec", 0) == 1 for part in value.as_real_imag())


def _points(sides: Sequence[sympy.Expr], seed: str) -> Iterator[dict[Any, Any]]:
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
