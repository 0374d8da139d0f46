r"""Decide exactly whether two expressions have the same value. Runs in worker processes only.

Free symbols get random rational values, and each transcendental part (``\pi``, ``e^x``, ``\log 2``) a random number
near its own value; exponentials, powers, trigonometric functions and logarithms of rationals are first written in terms
of independent parts. The rest are algebraic numbers: their difference is zero or larger than a separation bound
(Burnikel, Funke, Mehlhorn, Schirra and Schmitt, "A separation bound for real algebraic expressions", 2001). A rational
difference is computed exactly or, if its numbers are too long, modulo a random 127-bit prime. Functions without such a
form (``\arctan``, ``x!``) are compared to 250 digits.
"""

import hashlib
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import mpmath
import sympy
from sympy import QQ_I

_FILTER_DIGITS = 40  # rejects most different values; values that agree are decided exactly
_FILTER_AGREEMENT = sympy.Float("1e-25", _FILTER_DIGITS)
_UNRESOLVED = sympy.Float("1e-60", _FILTER_DIGITS)  # a sum that cancels may be rounding alone
_DIGITS = 300  # where no exact form is known
_AGREEMENT = sympy.Float("1e-250", _DIGITS)

_MAX_BITS = 100_000  # of the separation bound; beyond it, digits decide
_MAX_RATIONAL_BITS = 100_000  # beyond it, arithmetic is modulo a prime
_MAX_WRITTEN_BITS = 1_000_000
_MAX_EXPANDED = 200  # operations of an exponent
_MAX_EXPONENT = 50  # of a power in an exponent
_NEAR, _FURTHEST = 3, 10**6  # distance of points from 0; at least as far as the numbers in the expressions
_GRAIN = (1 << 61) - 1  # denominator of random values

_UNEVALUATED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_INFINITE = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
_HALF = Fraction(1, 2)

Point = dict[Any, Any]
_Prime = tuple[int, int]


class _UndecidedError(Exception):
    """The expression is too large to be decided exactly."""


class _NoValueError(Exception):
    """A division by zero."""


@dataclass(frozen=True, slots=True)
class _Sum:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Product:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Power:
    """A principal power; a power of -1 is a root of unity."""

    base: Any
    exponent: Fraction


@dataclass(frozen=True, slots=True)
class _Residue:
    """An element of QQ_I modulo a prime of which -1 is a square."""

    value: int
    prime: int

    def __add__(self, other: "_Residue") -> "_Residue":
        return _Residue((self.value + other.value) % self.prime, self.prime)

    def __mul__(self, other: "_Residue") -> "_Residue":
        return _Residue(self.value * other.value % self.prime, self.prime)

    def __pow__(self, exponent: int) -> "_Residue":
        return _Residue(pow(self.value, exponent, self.prime), self.prime)

    def __bool__(self) -> bool:
        return self.value != 0


# A number is a constant (an element of QQ_I, i.e. with rational real and imaginary part, or a residue) or one of these.
_COMPOSED = (_Sum, _Product, _Power)


def equal(a: sympy.Expr, b: sympy.Expr, rounding: Any = None) -> bool | None:
    """Whether two scalar expressions of real symbols are equal for all values; None if neither has a value.

    Args:
        rounding: relative tolerance if one of two numbers is a rounded decimal; None compares exactly.
    """
    if a in _INFINITE or b in _INFINITE:
        return bool(a == b) and a not in (sympy.zoo, sympy.nan)
    a, b = (side.doit() if side.has(*_UNEVALUATED) else side for side in (a, b))
    a, b = (side.replace(lambda part: part.is_Float, lambda value: sympy.Rational(str(value))) for side in (a, b))
    if a == b and not a.has(*_INFINITE):
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    # Seeded by the pair: verdicts do not depend on the batch, and an answer cannot be fitted to the points.
    draw = random.Random(hashlib.sha256(f"{a}\0{b}".encode()).digest())
    if rounding is not None:
        return _close_everywhere(a, b, [{}], _FILTER_DIGITS, rounding, 0)
    points = list(_points(symbols, (a, b), draw))
    first = _exactly(a, b, points[0], draw)
    if first.equal is not None and not first.piecewise and (first.equal or first.independent):
        return first.equal
    close = _close_everywhere(a, b, points, _FILTER_DIGITS, _FILTER_AGREEMENT, _UNRESOLVED)
    if close is False:
        return False
    found = [first, *(_exactly(a, b, point, draw) for point in points[1:])]
    decided = [exact for exact in found if exact.has_value]
    if decided and all(exact.equal for exact in decided):
        return True
    if any(exact.equal is False and exact.independent for exact in decided):
        return False
    if close is None:
        return False if decided else None
    return _close_everywhere(a, b, points, _DIGITS, _AGREEMENT, _AGREEMENT)


@dataclass(frozen=True, slots=True)
class _Exact:
    """A comparison at one point.

    Attributes:
        equal: None if it is too large to be decided.
        independent: whether the random parts are independent as far as is known, so that a nonzero difference proves
            inequality.
        piecewise: whether the sides may differ elsewhere (``|x|``, roots), so that all points count.
        has_value: False on a division by zero.
    """

    equal: bool | None
    independent: bool = False
    piecewise: bool = True
    has_value: bool = True


def _exactly(a: sympy.Expr, b: sympy.Expr, point: Point, draw: random.Random) -> _Exact:
    base = _coprime_base((a, b))
    scales: dict[Any, int] = {}
    for modulo in (False, True):
        prime = _prime(draw) if modulo else None
        try:
            for _ in range(2):
                algebraic = _Algebraic(point, draw, base, scales, prime)
                difference = _sum([algebraic.number(a), algebraic.negative(b)])
                if not algebraic.rescaled:
                    break
            return _Exact(_is_zero(difference), algebraic.independent, algebraic.piecewise)
        except _NoValueError:
            return _Exact(None, has_value=False)
        except (_UndecidedError, RecursionError):
            continue
    return _Exact(None)


def _prime(draw: random.Random) -> _Prime:
    prime = sympy.nextprime(draw.getrandbits(126) | 1 << 126)
    while prime % 4 == 3:
        prime = sympy.nextprime(prime)
    roots = (pow(base, (prime - 1) // 4, prime) for base in range(2, prime))
    return prime, next(root for root in roots if root * root % prime == prime - 1)


class _Algebraic:
    """Convert expressions to algebraic numbers; transcendental parts become random numbers.

    Args:
        point: a value for each symbol.
        draw: source of the random numbers.
        base: coprime integers; their logarithms express those of all rationals.
        scales: for each m in e^{qm}, a common denominator of the rationals q; if it grows, ``rescaled`` is set and the
            numbers must be computed again.
        prime: compute modulo this prime, given with a root of -1; fast for large powers, but takes no roots.
    """

    def __init__(
        self, point: Point, draw: random.Random, base: Sequence[int], scales: dict[Any, int], prime: _Prime | None
    ) -> None:
        self._point, self._draw, self._base, self._scales, self._prime = point, draw, base, scales, prime
        self._parts: dict[Any, Any] = {}
        self.independent, self.piecewise, self.rescaled = True, False, False

    def number(self, expression: Any) -> Any:
        """The value at the point; ``_UndecidedError`` if too large, ``_NoValueError`` on a division by zero."""
        if expression.is_Rational:
            return self.constant(expression)
        if expression == sympy.I:
            return self.constant(0, 1)
        if expression in _INFINITE:
            raise _NoValueError
        if expression in self._point:
            return self.constant(self._point[expression])
        if expression.is_Symbol or expression == sympy.pi:
            return self._part(expression)
        if expression.is_Add:
            return _sum([self.number(term) for term in expression.args])
        if expression.is_Mul:
            return _product([self.number(factor) for factor in expression.args])
        if expression.is_Pow or isinstance(expression, sympy.exp):
            return self._power(*expression.as_base_exp()) if expression.is_Pow else self._exp(expression.args[0])
        if expression == sympy.E:
            return self._exp(sympy.S.One)
        if isinstance(expression, sympy.UnevaluatedExpr):
            return self.number(expression.args[0])
        if isinstance(expression, sympy.Piecewise):
            self.piecewise = True
            return self.number(_branch(expression, self._point))
        for kind, convert in _CONVERSIONS.items():
            if isinstance(expression, kind):
                return convert(self, *expression.args)
        return self._opaque(expression)

    def constant(self, real: Any, imaginary: Any = 0) -> Any:
        """An element of QQ_I or, modulo a prime, its residue."""
        parts = [Fraction(int(part.numerator), int(part.denominator)) for part in (real, imaginary)]
        if self._prime is None:
            return QQ_I(*(sympy.QQ(part.numerator, part.denominator) for part in parts))
        prime, root = self._prime
        residues = [part.numerator * pow(part.denominator, -1, prime) for part in parts]
        return _Residue((residues[0] + root * residues[1]) % prime, prime)

    def negative(self, expression: Any) -> Any:
        return _product([self.constant(-1), self.number(expression)])

    def _raised(self, base: Any, exponent: Fraction) -> Any:
        if not isinstance(base, _Residue):
            return self._root(base, exponent) if exponent.denominator > 1 else _power(base, exponent)
        if not base and exponent < 0:
            raise _NoValueError
        if exponent.denominator > 1:
            raise _UndecidedError
        return base ** int(exponent)

    def _root(self, base: Any, exponent: Fraction) -> Any:
        """A power; that of a rational number as a product of roots of the base, which are fewer."""
        if isinstance(base, _COMPOSED) or base.y or base.x <= 0:
            return _power(base, exponent)
        factors = _factors(Fraction(int(base.x.numerator), int(base.x.denominator)), self._base)
        if not factors.keys() <= set(self._base):
            return _power(base, exponent)
        powers = [divmod(exponent * power, 1) for power in factors.values()]
        whole = [_power(QQ_I(number), Fraction(turns)) for number, (turns, _) in zip(factors, powers, strict=True)]
        return _product(
            [QQ_I.one, *whole, *(_power(QQ_I(n), rest) for n, (_, rest) in zip(factors, powers, strict=True))]
        )

    def _turn(self, exponent: Fraction) -> Any:
        if self._prime is None:
            return _root_of_unity(exponent)
        if exponent.denominator > 2:
            raise _UndecidedError
        return self.constant(0, 1) ** (int(2 * exponent) % 4)

    def _power(self, base: Any, exponent: Any) -> Any:
        rational = _rational_value(exponent)
        if base == sympy.E:
            return self._exp(exponent)
        if rational is None:
            return self._exp(sympy.Mul(exponent, sympy.log(base, evaluate=False)))
        self.piecewise = self.piecewise or (rational.denominator > 1 and bool(base.free_symbols))
        if base == -1:
            return self._turn(rational)
        return self._raised(self.number(base), rational)

    def _exp(self, exponent: Any) -> Any:
        """A product over the terms of the exponent: e^{x/2} and e^{2x+1} are powers of the same parts."""
        factors = []
        for term in sympy.Add.make_args(self._expanded(exponent)):
            rational, rest = term.as_coeff_Mul()
            if not rational.is_Rational:
                raise _UndecidedError
            power = Fraction(int(rational.p), int(rational.q))
            if rest == sympy.I * sympy.pi:
                factors.append(self._turn(power))
            elif isinstance(rest, sympy.log):
                self.piecewise = self.piecewise or bool(rest.free_symbols)
                factors.append(self._raised(self.number(rest.args[0]), power))
            elif not term.is_zero:
                self.independent = self.independent and _is_simple(rest)
                scale = math.lcm(self._scales.get(rest, 1), power.denominator)
                self.rescaled = self.rescaled or scale != self._scales.get(rest, scale)
                self._scales[rest] = scale
                factors.append(self._raised(self._part(sympy.exp(rest / scale)), power * scale))
        return _product([self.constant(1), *factors])

    def _log(self, argument: Any, base: Any = sympy.E) -> Any:
        if base != sympy.E:
            return self._ratio(self._log(argument), self._log(base))
        if argument == sympy.E:
            return self.constant(1)
        rational = _rational_value(argument)
        if rational == 0:
            raise _NoValueError
        if rational is not None:
            turn = [_product([self.constant(0, 1), self._part(sympy.pi)])] if rational < 0 else []
            factors = _factors(abs(rational), self._base)
            self.independent = self.independent and factors.keys() <= set(self._base)
            logarithms = [
                _product([self.constant(power), self._part(sympy.log(number, evaluate=False))])
                for number, power in factors.items()
            ]
            return _sum([self.constant(0), *logarithms, *turn])
        if argument.is_number and argument.is_positive:
            if argument.is_Mul and all(factor.is_positive for factor in argument.args):
                return _sum([self._log(factor) for factor in argument.args])
            base, exponent = argument.as_base_exp()
            power = _rational_value(exponent)
            if power not in (None, 1) and base.is_positive:
                assert power is not None
                return _product([self.constant(power), self._log(base)])
        return self._opaque(sympy.log(self._expanded(argument)))

    def _expanded(self, expression: Any) -> Any:
        """An exponent or argument as a sum of terms; logarithms of rationals in terms of the base."""
        powers = [_rational_value(power.exp) for power in expression.atoms(sympy.Pow)]
        if expression.count_ops() > _MAX_EXPANDED or any(p is not None and abs(p) > _MAX_EXPONENT for p in powers):
            raise _UndecidedError
        expression = expression.replace(
            lambda part: isinstance(part, sympy.log) and (_rational_value(part.args[0]) or 0) > 0, self._logs_of_base
        )
        return sympy.expand(expression, power_base=False, power_exp=False, log=False)

    def _logs_of_base(self, logarithm: Any) -> Any:
        argument, base = (*logarithm.args, sympy.E)[:2]
        factors = _factors(_rational_value(argument) or Fraction(1), self._base)
        total = sympy.Add(*(power * sympy.log(number, evaluate=False) for number, power in factors.items()))
        return total if base == sympy.E else total / sympy.log(base)

    def _circular(self, argument: Any) -> tuple[Any, Any]:
        cosine, sine = self._halves(self._exp(sympy.Mul(sympy.I, argument)))
        return cosine, _product([sine, self.constant(0, -1)])

    def _halves(self, z: Any) -> tuple[Any, Any]:
        """Half the sum and half the difference of z and 1/z."""
        inverse = self._raised(z, Fraction(-1))
        difference = _sum([z, _product([self.constant(-1), inverse])])
        return tuple(_product([self.constant(_HALF), twice]) for twice in (_sum([z, inverse]), difference))

    def _ratio(self, numerator: Any, denominator: Any) -> Any:
        return _product([numerator, self._raised(denominator, Fraction(-1))])

    def _abs(self, argument: Any) -> Any:
        number = self.number(argument)
        if QQ_I.of_type(number) and argument.is_number and not argument.has(sympy.pi, sympy.E, sympy.Function):
            return _power(QQ_I(number.x**2 + number.y**2, 0), _HALF)
        return _product([self.constant(self._sign_at_point(argument)), number])

    def _sign_at_point(self, expression: Any) -> int:
        self.piecewise = True
        value = self._value(expression)
        if not isinstance(value, sympy.Number) or abs(value) < _UNRESOLVED:
            raise _UndecidedError
        return 1 if value > 0 else -1

    def _extreme(self, sign: int, *arguments: Any) -> Any:
        best = arguments[0]
        for other in arguments[1:]:
            if self._sign_at_point(other - best) == sign:
                best = other
        return self.number(best)

    def _floor(self, argument: Any) -> Any:
        self.piecewise = True
        is_rational = all(_rational_value(power.exp) is not None for power in argument.atoms(sympy.Pow))
        rational = _rational_value(argument.subs(self._point)) if is_rational else None
        if rational is not None:
            return self.constant(math.floor(rational))
        value = self._value(argument)
        if not isinstance(value, sympy.Number) or abs(value) > 10**_NEAR or abs(value - round(value)) < _UNRESOLVED:
            raise _UndecidedError
        return self.constant(int(sympy.floor(value)))

    def _mod(self, dividend: Any, divisor: Any) -> Any:
        turns = self._floor(sympy.Mul(dividend, sympy.Pow(divisor, -1)))
        return _sum([self.number(dividend), _product([turns, self.negative(divisor)])])

    def _opaque(self, expression: Any) -> Any:
        """A part of unknown form, unless sympy evaluates it to another one."""
        known = expression.func(*expression.args)
        if known.func is not expression.func:
            return self.number(known)
        self.independent = False
        self.piecewise = True
        return self._part(known)

    def _part(self, part: Any) -> Any:
        """A random number near the part's value, so that signs and branches of roots are those of the value."""
        if part not in self._parts:
            value = self._value(part)
            components = [each for each in value.as_real_imag() if isinstance(each, sympy.Number)]
            if len(components) < 2 or not all(each.is_finite for each in components):
                components = [sympy.Integer(1), sympy.Integer(0)]
            self._parts[part] = self.constant(*map(self._near_real, components))
        return self._parts[part]

    def _near_real(self, value: Any) -> Fraction:
        if value == 0:
            return Fraction(0)
        if not 2**-100 < abs(value) < 2**100:
            value = sympy.sign(value)
        near = Fraction(str(sympy.Float(value, 8)))
        return near * (1 + Fraction(self._draw.randint(1, _GRAIN), _GRAIN << 20))

    def _value(self, expression: Any) -> Any:
        return _decimal(expression, self._point, _FILTER_DIGITS)


_Convert = Callable[..., Any]
_CONVERSIONS: dict[Any, _Convert] = {
    sympy.log: _Algebraic._log,
    sympy.sin: lambda self, x: self._circular(x)[1],
    sympy.cos: lambda self, x: self._circular(x)[0],
    sympy.tan: lambda self, x: self._ratio(*reversed(self._circular(x))),
    sympy.cot: lambda self, x: self._ratio(*self._circular(x)),
    sympy.sec: lambda self, x: self._ratio(self.constant(1), self._circular(x)[0]),
    sympy.csc: lambda self, x: self._ratio(self.constant(1), self._circular(x)[1]),
    sympy.sinh: lambda self, x: self._halves(self._exp(x))[1],
    sympy.cosh: lambda self, x: self._halves(self._exp(x))[0],
    sympy.tanh: lambda self, x: self._ratio(*reversed(self._halves(self._exp(x)))),
    sympy.Abs: _Algebraic._abs,
    sympy.sign: lambda self, x: self.constant(self._sign_at_point(x)),
    sympy.Max: lambda self, *x: self._extreme(1, *x),
    sympy.Min: lambda self, *x: self._extreme(-1, *x),
    sympy.floor: _Algebraic._floor,
    sympy.ceiling: lambda self, x: _product([self.constant(-1), self._floor(sympy.Mul(-1, x))]),
    sympy.Mod: _Algebraic._mod,
}


def _coprime_base(expressions: Iterable[sympy.Expr]) -> list[int]:
    """Pairwise coprime integers whose products are the bases of powers and the arguments of logarithms.

    Like those of primes, their logarithms are linearly independent over the rationals.
    """
    nodes = [node for side in expressions for node in side.atoms(sympy.Pow, sympy.log)]
    numbers = [_rational_value(node.args[0]) for node in nodes]
    pending = [part for value in numbers if value is not None for part in (abs(value.numerator), value.denominator)]
    base: list[int] = []
    while pending:
        number = pending.pop()
        other = next((other for other in base if math.gcd(number, other) > 1), None)
        if other is not None:
            base.remove(other)
            common = math.gcd(number, other)
            pending += [common, number // common, other // common]
        elif number > 1:
            base.append(number)
    return base


def _factors(value: Fraction, base: Iterable[int]) -> dict[int, int]:
    """Exponents of a coprime base in a positive rational number; the rest is a factor of its own."""
    exponents: dict[int, int] = {}
    for size, sign in ((value.numerator, 1), (value.denominator, -1)):
        for number in base:
            while size % number == 0:
                size //= number
                exponents[number] = exponents.get(number, 0) + sign
        if size > 1:
            exponents[size] = exponents.get(size, 0) + sign
    return exponents


def _is_simple(monomial: Any) -> bool:
    """Whether different monomials are linearly independent: products of symbols, logarithms and roots."""
    return all(
        factor in (sympy.I, sympy.pi, sympy.E)
        or factor.is_Symbol
        or (factor.is_Pow and factor.exp.is_Rational and (factor.base.is_Symbol or factor.base.is_Integer))
        or (isinstance(factor, sympy.log) and factor.args[0].is_Integer)
        for factor in sympy.Mul.make_args(monomial)
        if factor != 1
    )


def _rational_value(expression: Any) -> Fraction | None:
    """The value of integer arithmetic, or None if it is anything else or too large."""
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if not (expression.is_Add or expression.is_Mul or expression.is_Pow):
        return None
    values = [_rational_value(argument) for argument in expression.args]
    if any(value is None for value in values):
        return None
    if not expression.is_Pow:
        return reduce(Fraction.__add__ if expression.is_Add else Fraction.__mul__, values)  # type: ignore[arg-type]
    base, exponent = values
    assert base is not None
    assert exponent is not None
    if exponent.denominator > 1 or abs(exponent) * _bits(base) > _MAX_RATIONAL_BITS or (base == 0 and exponent < 0):
        return None
    return Fraction(base**exponent)


def has_long_power(expression: sympy.Expr) -> bool:
    """Whether the expression has a power of a rational number that is too long to write out."""
    powers = [map(_rational_value, power.args) for power in expression.atoms(sympy.Pow)]
    return any(None not in (b, e) and abs(e) * _bits(b) > _MAX_WRITTEN_BITS for b, e in powers)  # type: ignore[arg-type]


def _bits(value: Any) -> int:
    return int(value.numerator).bit_length() + int(value.denominator).bit_length()


def _sum(terms: Iterable[Any]) -> Any:
    return _combined(_Sum, operator.add, QQ_I.zero, terms)


def _product(factors: Iterable[Any]) -> Any:
    return _combined(_Product, operator.mul, QQ_I.one, factors)


def _combined(kind: type[_Sum | _Product], operation: Callable[..., Any], neutral: Any, parts: Iterable[Any]) -> Any:
    """A flat sum or product; its constants are one part, which is left out if it is neutral."""
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, kind) else (part,))]
    constants = [part for part in flat if not isinstance(part, _COMPOSED)]
    composed = [part for part in flat if isinstance(part, _COMPOSED)]
    if constants:
        constant = reduce(operation, constants)
        if not composed or (kind is _Product and not constant):
            return constant
        composed += [constant] if constant != neutral else []
    return kind(tuple(composed)) if len(composed) > 1 else composed[0]


def _power(base: Any, exponent: Fraction) -> Any:
    if exponent in (0, 1):
        return base if exponent == 1 else QQ_I.one
    if isinstance(base, _Power) and exponent.denominator == 1:
        return _power(base.base, base.exponent * exponent)
    if not QQ_I.of_type(base):
        return _Power(base, exponent)
    if not base and exponent < 0:
        raise _NoValueError
    if max(map(_bits, (base.x, base.y))) * abs(exponent) > _MAX_RATIONAL_BITS:
        raise _UndecidedError
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base.y or not base:
        return _Power(base, exponent) if base else base
    if base == QQ_I(-1):
        return _root_of_unity(exponent)
    if base.x < 0:
        return _product([_root_of_unity(exponent), _power(-base, exponent)])
    terms = [sympy.integer_nthroot(int(term), exponent.denominator) for term in (base.x.numerator, base.x.denominator)]
    if all(is_perfect for _, is_perfect in terms):
        return _power(QQ_I(sympy.QQ(int(terms[0][0]), int(terms[1][0])), 0), Fraction(exponent.numerator))
    return _Power(base, exponent)


def _root_of_unity(exponent: Fraction) -> Any:
    """A power of -1, as a sign and a power between -1/2 and 1/2."""
    turns = round(exponent)
    rest, sign = exponent - turns, QQ_I(-1) ** abs(turns)
    if abs(rest) == _HALF:
        return sign * QQ_I(0, 1 if rest > 0 else -1)
    return sign if rest == 0 else _product([sign, _Power(QQ_I(-1), rest)])


def _is_zero(number: Any) -> bool:
    """Whether an algebraic number is zero; ``_UndecidedError`` if that takes too many bits."""
    if not isinstance(number, _COMPOSED):
        return not number
    bits = _separation_bits(number)
    if bits > _MAX_BITS:
        raise _UndecidedError
    with mpmath.workprec(int(2 * bits) + 256):
        return bool(abs(_numeric(number)) < mpmath.mpf(2) ** -(int(bits) + 2))


def _separation_bits(number: Any) -> float:
    """``-log2`` of a lower bound of the absolute value, if it is not zero."""
    roots: dict[Any, int] = {}
    upper, lower = _conjugate_bounds(number, roots)
    unity = roots.pop(QQ_I(-1), 1)
    degree = float(math.prod([int(sympy.totient(unity)), *roots.values()]))
    return (degree - 1) * upper + lower


def _conjugate_bounds(number: Any, roots: dict[Any, int]) -> tuple[float, float]:
    """Write a number as a quotient of algebraic integers; return ``log2`` of a bound of all conjugates of each.

    Adds to ``roots`` the degree of each root in the number and the order of its roots of unity (with the key -1).
    """
    if QQ_I.of_type(number):
        if number.y:
            roots[QQ_I(-1)] = math.lcm(roots.get(QQ_I(-1), 1), 4)
        common = math.lcm(int(number.x.denominator), int(number.y.denominator))
        return _log2(int((abs(number.x) + abs(number.y)) * common)), _log2(common)
    if isinstance(number, _Sum):
        bounds = [_conjugate_bounds(term, roots) for term in number.parts]
        common_lower = math.fsum(lower for _, lower in bounds)
        return max(upper - lower for upper, lower in bounds) + common_lower + math.log2(len(bounds)), common_lower
    if isinstance(number, _Product):
        bounds = [_conjugate_bounds(factor, roots) for factor in number.parts]
        return math.fsum(upper for upper, _ in bounds), math.fsum(lower for _, lower in bounds)
    upper, lower = _conjugate_bounds(number.base, roots)
    degree = number.exponent.denominator
    if degree > 1:
        order = 2 * degree if number.base == QQ_I(-1) else degree
        roots[number.base] = math.lcm(roots.get(number.base, 1), order)
        if upper >= lower:
            upper = (upper + (degree - 1) * lower) / degree
        else:
            lower = ((degree - 1) * upper + lower) / degree
    size = abs(number.exponent.numerator)
    return (upper * size, lower * size) if number.exponent > 0 else (lower * size, upper * size)


def _log2(value: int) -> float:
    return math.log2(value) if value > 1 else 0.0


def _numeric(number: Any) -> Any:
    if QQ_I.of_type(number):
        x, y = (mpmath.mpf(int(part.numerator)) / int(part.denominator) for part in (number.x, number.y))
        return mpmath.mpc(x, y)
    if isinstance(number, _Sum):
        return mpmath.fsum(_numeric(term) for term in number.parts)
    if isinstance(number, _Product):
        return mpmath.fprod(_numeric(factor) for factor in number.parts)
    if number.exponent < 0 and not QQ_I.of_type(number.base) and _is_zero(number.base):
        raise _NoValueError
    if number.base == QQ_I(-1):
        angle = mpmath.mpf(number.exponent.numerator) / number.exponent.denominator
        return mpmath.mpc(mpmath.cospi(angle), mpmath.sinpi(angle))
    root = _numeric(number.base)
    if number.exponent.denominator > 1:
        root = mpmath.root(root, number.exponent.denominator)
    return root**number.exponent.numerator


def _close_everywhere(
    a: sympy.Expr, b: sympy.Expr, points: Iterable[Point], digits: int, relative: Any, absolute: Any
) -> bool | None:
    """Whether two expressions agree at all points where both have values; None if there is none."""
    compared = False
    for point in points:
        first, second = (_decimal(side, point, digits) for side in (a, b))
        if not (_is_finite(first) and _is_finite(second)):
            continue
        compared = True
        difference = abs(first - second)
        if difference > absolute and difference > relative * max(abs(first), abs(second)):
            return False
    return True if compared else None


def _decimal(expression: sympy.Expr, point: Point, digits: int) -> Any:
    # Not by substitution: sympy would factor long rational numbers under roots.
    if expression.has(sympy.Piecewise):
        expression = expression.replace(sympy.Piecewise, lambda *pieces: _branch(sympy.Piecewise(*pieces), point))
    return expression.evalf(digits, subs=point, maxn=3 * digits)


def _branch(pieces: sympy.Piecewise, point: Point) -> Any:
    """The piece of a sum's closed form that holds at the point."""
    return next((piece for piece, condition in pieces.args if condition.subs(point) == True), sympy.nan)  # noqa: E712


def _points(symbols: Sequence[Any], sides: Sequence[Any], draw: random.Random) -> Iterator[Point]:
    """Points at which functions differ that only agree on one side of 0, of a constant or of each other.

    Every symbol is positive and negative, less and greater than every other one, near and far.
    """
    if not symbols:
        yield {}
        return
    constants = [abs(number) for side in sides for number in side.atoms(sympy.Number) if number.is_finite]
    far = 10 + min(_FURTHEST, max((int(min(number, _FURTHEST)) for number in constants), default=0))
    alternating = [1 - 2 * (n % 2) for n in range(len(symbols))]
    near_and_far = ((_NEAR, 1, False), (_NEAR, -1, False), (3 * far, 1, True), (3 * far, -1, True))
    for reach, sign, falling in near_and_far:
        yield _point(symbols, [sign] * len(symbols), reach, falling, draw)
    if len(symbols) > 1:
        for sign in (1, -1):
            yield _point(symbols, [sign * one for one in alternating], _NEAR, False, draw)


def _point(symbols: Sequence[Any], signs: list[int], reach: int, falling: bool, draw: random.Random) -> Point:
    sizes = sorted((draw.randint(_GRAIN * reach // 3, _GRAIN * reach) for _ in symbols), reverse=falling)
    return {s: sympy.Rational(sign * size, _GRAIN) for s, sign, size in zip(symbols, signs, sizes, strict=True)}


def _is_finite(value: Any) -> bool:
    return bool(value.is_number) and all(
        isinstance(part, sympy.Number) and part.is_finite for part in value.as_real_imag()
    )
