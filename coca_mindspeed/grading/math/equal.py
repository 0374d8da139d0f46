r"""Compare parsed answers: collections by their elements, relations by their sides, scalars by their values.

Constants are equal if they agree to 1,080 digits, expressions if they agree to 280 digits at random points of the real
domain of either; the pair determines the points. Runs in worker processes only: sympy may hang or exhaust memory.
"""

import hashlib
import itertools
import random
import re
import string
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from mpmath.libmp import NoConvergence
from sympy.core.function import AppliedUndef

from coca_mindspeed.grading.math.parse import (
    REALS,
    SET_OPERATIONS,
    Decimal,
    Group,
    NotMathematicsError,
    Relation,
    parse,
    parse_tokens,
)
from coca_mindspeed.grading.math.plain import DOUBLE_DIGITS, ROUNDED, terminates
from coca_mindspeed.grading.math.reading import GREEK, Reading
from coca_mindspeed.grading.verdict import Outcome

_DIGITS, _DIGITS_AT_POINTS, _SPARE_DIGITS = 1_100, 300, 20  # computed: of constants, at each point; not compared
_MIXED_POINTS = 8  # with both signs, besides three points with positive and three with negative values
_MAX_EXPANDED = 20  # largest power of a polynomial that is multiplied out
_GRAIN = (1 << 61) - 1  # denominator of random values
# Places of letters in their alphabets, without w, which may stand before or behind x, y and z.
_PLACES = {letter: ord(letter) for letter in string.ascii_letters if letter != "w"}
_PLACES |= {letter: 1_000 + place for place, letter in enumerate(GREEK)}
_LETTER = re.compile(r"(\\?[a-zA-Z]+)(?:_\{?(\d+)\}?)?")
_NEIGHBOURS = 2  # places between letters that are named in the alphabet's order
_TURNED = {">": "<", r"\ge": r"\le"}


def compare(pair: tuple[str, str], arithmetic: bool = False) -> tuple[Outcome, str]:
    """Compare the bodies of a gold answer and an answer; with ``arithmetic``, numbers joined by dashes are computed."""
    reading = Reading.of(pair[0], arithmetic)
    try:
        gold = parse(pair[0], reading)
    except NotMathematicsError as error:
        return Outcome.UNGRADABLE, f"the gold answer cannot be used: it cannot be parsed as mathematics: {error}"
    try:
        return (Outcome.RIGHT if same(gold, parse(pair[1], reading)) else Outcome.WRONG), ""
    except NotMathematicsError as error:
        return Outcome.WRONG, f"the answer cannot be parsed as mathematics: {error}"


def same(gold: Any, answer: Any) -> bool:
    gold, answer = (
        side.items[0] if isinstance(side, Group) and len(side.items) == 1 and side.opened in ("", r"\{") else side
        for side in (gold, answer)
    )
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relations(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        gold = _value(gold) if isinstance(gold, Relation) else gold
        answer = _value(answer, of_sums=True) if isinstance(answer, Relation) else answer
        return gold is not None and answer is not None and same(gold, answer)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_groups(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_sets(gold, answer)
    return same_scalar(gold, answer)


def _same_groups(gold: Group, answer: Group) -> bool:
    """A list is compared in any order if it is the gold answer, or if that is a set; as an answer it may be a point."""
    wanted, given = gold.opened + gold.closed, answer.opened + answer.closed
    if wanted in SET_OPERATIONS or given in SET_OPERATIONS:
        return _same_sets(gold, answer)
    names, others = ([item.name for item in side.items if isinstance(item, Relation)] for side in (gold, answer))
    unordered = wanted in ("", r"\{\}") and given in ("", r"\{\}") and (len({*names}) < 2 or others)
    if unordered or min(len({*names}), len({*others})) > 1:
        left = list(answer.items)
        for item in gold.items:
            if (place := next((n for n, other in enumerate(left) if same(item, other)), None)) is None:
                return False
            del left[place]
        return not left
    if _are_turned(names) or _are_turned(others) or len(gold.items) != len(answer.items):
        return False
    brackets_left_out = {wanted, given} == {"", "()"} and not any(map(_is_interval, (gold, answer)))
    return (wanted == given or brackets_left_out) and all(map(same, gold.items, answer.items))


def _is_interval(group: Group) -> bool:
    return group.is_interval or any(item in (sympy.oo, -sympy.oo) for item in group.items)


def _are_turned(names: Sequence[str]) -> bool:
    """Whether neighbours in the alphabet, or indices, are not in order: the point (1,2) is not (b,a)=(1,2).

    Others have no order of their own: (m,b) is a slope and an intercept.
    """
    letters = [match for name in names if (match := _LETTER.fullmatch(name)) and match[1] in _PLACES]
    places = [(_PLACES[match[1]], int(match[2] or 0)) for match in letters]
    return any(
        (place == other and index > later) or (index == later and 0 < place - other <= _NEIGHBOURS)
        for (place, index), (other, later) in itertools.combinations(places, 2)
    )


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
        return None if node is sympy.nan else sympy.FiniteSet(node)
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
    if not all(isinstance(item, sympy.Expr) and item is not sympy.nan for item in items):
        return None
    if node.opened in (r"\{", ""):
        return sympy.FiniteSet(*items)
    if len(items) != 2 or not all(item.is_extended_real for item in items):
        return None
    return sympy.Interval(*items, node.opened == "(", node.closed == ")")


def _value(relation: Relation, of_sums: bool = False) -> Any | None:
    """Return the value that a relation states: 6 for ``x = 6``, ``f(2) = 6``, ``2 + 4 = 6``; None for ``2x = 6``.

    With ``of_sums``, ``m + n = 6`` states a number too.
    """
    if set(relation.signs) != {"="}:
        return _interval(relation)
    left, *values = relation.sides
    if not all(same(value, values[-1]) for value in values[:-1]):
        return None
    named = relation.has_one_name or (of_sums and relation.name and not getattr(values[0], "free_symbols", ()))
    return values[-1] if named or len(values) > 1 or (not relation.name and same(left, values[-1])) else None


def _same_relations(gold: Relation, answer: Relation) -> bool:
    """Whether two equations have the same name and value, or two relations the same sides, perhaps moved or turned."""
    if gold.has_one_name and gold.name == answer.name and set(gold.signs) == set(answer.signs) == {"="}:
        wanted, given = _value(gold), _value(answer)
        return wanted is not None and given is not None and same(wanted, given)
    (signs, sides), (other_signs, others) = _turned(gold), _turned(answer)
    if len(signs) == 1 and signs == other_signs:
        left, right = sides[0] - sides[1], others[0] - others[1]
        turned = signs[0] in ("=", r"\ne") and same_scalar(left, -right)
        return bool(left.free_symbols or left.atoms(AppliedUndef)) and (turned or same_scalar(left, right))
    return signs == other_signs and all(map(same_scalar, sides, others))


def _turned(relation: Relation) -> tuple[list[str], list[Any]]:
    """Signs and sides, the smallest first; the left one is parsed only here if it is a name."""
    left = parse_tokens(relation.left) if relation.name else relation.sides[0]
    sides = [side.value if isinstance(side, Decimal) else side for side in (left, *relation.sides[1:])]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        raise NotMathematicsError("a relation between collections")
    signs = list(relation.signs)
    return ([_TURNED[sign] for sign in reversed(signs)], sides[::-1]) if set(signs) <= {">", r"\ge"} else (signs, sides)


def _interval(relation: Relation) -> Group | None:
    r"""``(2, 5]`` of ``2 < x \le 5``, all numbers but 2 of ``x \ne 2``; the ends may be any expressions."""
    (signs, sides), unknown = _turned(relation), _unknown(relation)
    ends = [end for end in sides if end is not unknown]
    fits = unknown.is_Symbol and 0 < len(ends) == len(signs) < 3
    if not fits or any(unknown in end.free_symbols for end in ends):
        return None
    if signs == [r"\ne"]:
        return Group(r"\setminus", (REALS, Group(r"\{", tuple(ends), r"\}")))
    if not set(signs) <= {"<", r"\le"}:
        return None
    low, high = ([-sympy.oo, *ends] if sides[0] is unknown else [*ends, sympy.oo])[:2]
    closed = signs[-1] == r"\le" and high != sympy.oo
    return Group("[" if signs[0] == r"\le" and low != -sympy.oo else "(", (low, high), "]" if closed else ")", True)


def _unknown(relation: Relation) -> Any:
    """The symbol between the bounds of an inequality."""
    sides = _turned(relation)[1]
    return sides[1] if len(sides) == 3 or not sides[0].is_Symbol else sides[0]


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
    if not isinstance(decimal, Decimal) or isinstance(exact, Decimal) or exact.free_symbols:
        return False
    if not exact.is_extended_real or (exact.is_Rational and terminates(Fraction(int(exact.p), int(exact.q)))):
        return False
    if decimal is answer and decimal.digits < DOUBLE_DIGITS:
        return False
    error = ROUNDED if decimal is gold else Fraction(1, 10 ** (DOUBLE_DIGITS - 1))
    with mpmath.workdps(30):
        value, number = _numbers([exact, decimal.value], {})
        return bool(abs(value - number) <= abs(number) * error.numerator / error.denominator)


def _vanishes(difference: sympy.Expr, sides: Sequence[sympy.Expr]) -> bool:
    if not difference.is_commutative:
        difference = _commuting(difference)
        sides = [difference, sympy.S.Zero]
    calls = _values_of_functions(difference)
    difference, *sides = (each.xreplace(calls) for each in (difference, *sides))
    if difference.is_Rational:
        return bool(difference == 0)
    if not difference.free_symbols:  # only terms of a sum can cancel
        return bool(difference.is_Add) and _agree([difference, sympy.S.Zero], {}) is True
    powers = (power.exp for power in difference.atoms(sympy.Pow))
    if all(power.is_Integer and power <= _MAX_EXPANDED for power in powers) and difference.is_polynomial():
        return bool(sympy.expand(difference) == 0)
    agree = False
    for point in _points(sides, "".join(map(str, sides))):
        match _agree(sides, point):
            case False:
                return False
            case True:
                agree = True
    return agree


def _values_of_functions(expression: sympy.Expr) -> dict[sympy.Expr, sympy.Dummy]:
    """A symbol for each value of an unknown function; values of equal arguments have the same."""
    symbols: dict[sympy.Expr, sympy.Dummy] = {}
    for call in sorted(expression.atoms(AppliedUndef), key=str):
        same_call = (other for other in symbols if other.func == call.func and len(other.args) == len(call.args))
        equal = next((other for other in same_call if all(map(same_scalar, other.args, call.args))), None)
        symbols[call] = sympy.Dummy(real=True) if equal is None else symbols[equal]
    return symbols


def _commuting(expression: sympy.Expr) -> sympy.Expr:
    """The expression with a symbol for each product of matrices."""
    products: dict[sympy.Expr, sympy.Dummy] = {}
    terms = []
    for term in sympy.Add.make_args(sympy.expand(expression)):
        numbers, matrices = term.args_cnc()
        product = sympy.Mul(*matrices)
        terms.append(sympy.Mul(*numbers) * (products.setdefault(product, sympy.Dummy(real=True)) if matrices else 1))
    return sympy.Add(*terms)


def _agree(sides: Sequence[Any], point: dict[Any, Any]) -> bool | None:
    """Whether two values agree relatively to their largest term; None if neither is a real number."""
    terms = [term for side in sides for term in sympy.Add.make_args(side)]
    digits = _DIGITS_AT_POINTS if point else _DIGITS
    with mpmath.workdps(digits):
        try:
            first, second, *sizes = _numbers([*sides, *terms], point)
            size = max(map(abs, sizes))
        except (ZeroDivisionError, ValueError, OverflowError, NoConvergence):
            return None
        if not mpmath.isfinite(size):
            return None
        agree = bool(abs(first - second) <= size * mpmath.mpf(10) ** (_SPARE_DIGITS - digits))
        real = not point or mpmath.im(first) == 0 or mpmath.im(second) == 0
        return agree if real or agree or any(side.has(sympy.I) for side in sides) else None


def _numbers(expressions: Sequence[Any], point: dict[Any, Any]) -> list[Any]:
    """The values of expressions at a point, to the digits that mpmath works with."""
    unit = sympy.Dummy()  # of the imaginary numbers: Python's own has 16 digits
    values = [expression.xreplace({sympy.I: unit}) for expression in expressions]
    calculate = sympy.lambdify([*point, unit], values, "mpmath", dummify=True)
    return list(calculate(*(mpmath.mpf(int(n.p)) / int(n.q) for n in point.values()), mpmath.mpc(0, 1)))


def _points(sides: Sequence[sympy.Expr], seed: str) -> Iterator[dict[Any, Any]]:
    """Random values of all symbols, of every pair of signs and all sizes; some beyond all numbers in the sides."""
    symbols = sorted({symbol for side in sides for symbol in side.free_symbols}, key=str)
    draw = random.Random(hashlib.sha256(seed.encode()).digest())
    far = 4 * min(max([3, *(abs(float(n)) for side in sides for n in side.atoms(sympy.Rational))]), 1e9)
    # No set of points at which a symbol is positive contains another's: each pair has both mixed signs somewhere.
    halves = [*itertools.combinations(range(_MIXED_POINTS), _MIXED_POINTS // 2)]
    draw.shuffle(halves)
    positive = {symbol: {*halves[n % len(halves)]} for n, symbol in enumerate(symbols)}
    for n in range(6 + _MIXED_POINTS):
        low, high = ((0, 1), (0, 3), (far / 2, far))[n % 3]
        yield {
            symbol: sympy.Rational(int((low + (high - low) * draw.random()) * _GRAIN), _GRAIN)
            * (1 if n < 3 or n - 6 in positive[symbol] else -1)
            for symbol in symbols
        }
