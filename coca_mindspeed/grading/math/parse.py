r"""Parse an answer in one spelling (:mod:`.normalise`): lists, intervals, sets, matrices, relations, expressions.

A recursive descent. Two symbols are equal only if their letter, case, alphabet, index, accent and primes are. Runs in
worker processes only: sympy evaluates ``9^{9^{9^9}}`` while it is built.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sympy

from coca_mindspeed.grading.math.normalise import FIGURE
from coca_mindspeed.grading.math.reading import ACCENTS, CLOSING, GREEK, OPENING, Name, Reading
from coca_mindspeed.grading.math.vectors import Vector, crossed


class NotMathematicsError(ValueError):
    """The text is no answer that this parser knows."""


class Group(NamedTuple):
    """A collection between brackets, a list, or, by ``opened``, a ratio, a kind of matrix, ``row`` or set operation."""

    opened: str
    items: tuple[Any, ...]
    closed: str = ""
    is_interval: bool = False  # (2, 3) of 2 < x < 3 or x \in (2, 3): neither a point nor a list in brackets


class Relation(NamedTuple):
    """A chain: ``sides[0] signs[0] sides[1] ...``; a left side of names, ``x``, ``f(x)`` or ``m+n``, is not parsed."""

    signs: tuple[str, ...]
    sides: tuple[Any, ...]
    name: str
    left: tuple[str, ...] = ()  # the tokens of the name

    @property
    def has_one_name(self) -> bool:
        return re.fullmatch(_ONE_NAME, self.name) is not None


class Decimal(NamedTuple):
    """A decimal that is a whole element and may be rounded."""

    value: sympy.Rational
    digits: int


SET_OPERATIONS = (r"\cup", r"\cap", r"\setminus")
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv")
_ONE_NAME = (
    rf"(?:{FIGURE}|(?!\\(?:sin|cos|tan|ln|log)\()(?:\\?[a-zA-Z]+|\\text\{{[^{{}}]*\}})'*(?:_(?:\w|\{{\w+\}}))?'*"
    r"(?:\([^()]*\))?)"
)
_LETTER = r"\\?[a-zA-Z]+(?:_\w)?"
_NAME = re.compile(rf"{_ONE_NAME}(?:\+{_ONE_NAME})*")
_FACTORS = re.compile(r"\\begin\{(?:[pbB]|small)?matrix|\\begin\{array")  # may stand behind a number


def parse(text: str, reading: Reading | None = None) -> Any:
    """A sympy expression, a :class:`Decimal`, :class:`Group` or :class:`Relation`; ``NotMathematicsError``.

    Args:
        reading: the gold answer's, by default the text's own.
    """
    return parse_tokens((reading or Reading.of(text)).tokens(text))


def parse_tokens(tokens: Sequence[str]) -> Any:
    try:
        return _structure([*tokens])
    except RecursionError:
        raise NotMathematicsError("it is too deep") from None


def _split(tokens: Sequence[str], signs: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The parts between signs that are outside of brackets, and these signs."""
    parts: list[list[str]] = [[]]
    found, depth = [], 0
    for token in tokens:
        depth += (token in OPENING or token.startswith(r"\begin")) - (token in CLOSING or token.startswith(r"\end"))
        if depth == 0 and token in signs:
            found.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def _structure(tokens: list[str]) -> Any:
    if not tokens:
        raise NotMathematicsError("an element is missing")
    for word, sign, operation in ((r"\text{or}", r"\lor", r"\cup"), (r"\text{and}", r"\land", r"\cap")):
        parts, separators = _split(tokens, (word, sign))
        if separators:
            items = tuple(_structure(part[:-1] if part[-1:] == [","] else part) for part in parts)
            if all(isinstance(item, Relation) and "=" not in item.signs for item in items):
                return Group(operation, items)
            if sign in separators:
                _check_equations(items, sign)
            return _excluding(items) or _list(items)
    parts, separators = _split(tokens, (",", ";"))
    if separators:
        items = tuple(map(_structure, parts))
        return _excluding(items) or _conditions(items) or _list(items)
    parts, separators = _split(tokens, _RELATIONS)
    if separators == [r"\in"]:
        inside = _structure(parts[1])
        return inside._replace(is_interval=True) if isinstance(inside, Group) else inside
    if separators:
        name = "".join(parts[0])
        name = name if _NAME.fullmatch(name) else ""
        follows = separators[-1] == r"\approx" and (len(separators) > 1 or not name)
        if follows and _is_rounded(*map(_structure, parts[-2:])):
            return _structure(tokens[: -1 - len(parts[-1])])
        if separators == ["="] and (point := _named_point(*parts)):
            return point
        sides = sympy.S.Zero if name else _structure(parts[0]), *map(_structure, parts[1:])
        signs = tuple({r"\approx": "=", r"\equiv": "="}.get(sign, sign) for sign in separators)
        relation = Relation(signs, sides, name, tuple(parts[0]))
        return (_excluding([relation]) if isinstance(sides[-1], Group) else None) or relation
    for signs in ((":",), (r"\mod",), SET_OPERATIONS):
        parts, separators = _split(tokens, signs)
        if len(set(separators)) > 1:
            raise NotMathematicsError("two set operations")
        if separators:
            return Group(separators[0], tuple(map(_structure, parts)))
    return _element(tokens)


def _check_equations(items: Iterable[Any], sign: str) -> None:
    r"""``\lor`` takes equations for one unknown, ``\land`` for different ones: x is not 2 and 3 at once."""
    names = [item.name for item in items if isinstance(item, Relation) and "=" in item.signs]
    several = len(set(names)) == len(names) if sign == r"\land" else len(set(names)) < 2
    if not several or not all(isinstance(item, Relation) for item in items):
        raise NotMathematicsError(f"{sign} between other things than conditions")


def _excluding(items: Sequence[Any]) -> Group | None:
    r"""The conditions ``x \ne 1`` and ``x \ne 2`` of ``x \ne 1, 2``, ``x \ne 1, x \ne 2`` or ``x \ne \pm 1``."""
    first, values = items[0], list[Any]()
    if not isinstance(first, Relation) or first.signs != (r"\ne",) or not first.has_one_name:
        return None
    for item in items:
        alike = isinstance(item, Relation) and (item.signs, item.name) == (first.signs, first.name)
        value = item.sides[1] if alike else item
        values += value.items if isinstance(value, Group) and not value.opened else (value,)
    if not all(isinstance(value, (sympy.Expr, Decimal)) for value in values):
        return None
    return Group(r"\cap", tuple(first._replace(sides=(first.sides[0], value)) for value in values))


def _conditions(items: Sequence[Any]) -> Group | None:
    r"""All conditions of ``x \ge 0, x \ne 1`` hold at once; without ``\ne``, ``x < 0, x > 1`` are two cases."""
    bounds = [item for item in items if isinstance(item, Relation) and {*item.signs} <= {"<", ">", r"\le", r"\ge"}]
    excluded = _excluding([item for item in items if not any(item is bound for bound in bounds)] or items)
    if not bounds or excluded is None:
        return None
    conditions = (*bounds, *excluded.items)
    names = {item.name or str(item.sides[1]) for item in conditions}
    sides = (_exact(side) for item in conditions for side in item.sides)
    names |= {str(symbol) for side in sides for symbol in getattr(side, "free_symbols", ())}
    return Group(r"\cap", conditions) if len(names) == 1 and re.fullmatch(_LETTER, names.pop()) else None


def _exact(node: Any) -> Any:
    return node.value if isinstance(node, Decimal) else node


def _is_rounded(exact: Any, rounded: Any) -> bool:
    """Whether a decimal or integer differs from a number by less than a unit of its last place."""
    exact, rounded = _exact(exact), _exact(rounded)
    if not isinstance(exact, sympy.Expr) or not exact.is_comparable or not isinstance(rounded, sympy.Rational):
        return False
    places = next((n for n in range(40) if 10**n % rounded.q == 0), None)
    return places is not None and bool(abs(sympy.N(exact - rounded, 50)) < sympy.Rational(1, 10**places))


def _named_point(left: list[str], right: list[str]) -> Group | None:
    """``(a=1, b=2)`` of ``(a,b)=(1,2)``."""
    parts = _split(left[1:-1], (",",))[0] if left[:1] == ["("] else []
    names = ["".join(part) for part in parts]
    if len(names) < 2 or not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
        return None
    point = _structure(right)
    if not isinstance(point, Group) or (point.opened, len(point.items)) != ("(", len(names)):
        return None
    rows = zip(names, parts, point.items, strict=True)
    items = (Relation(("=",), (sympy.S.Zero, value), name, tuple(part)) for name, part, value in rows)
    return point._replace(items=tuple(items))


def _list(items: Iterable[Any], opened: str = "", closed: str = "") -> Group:
    r"""A collection; a list in it becomes its elements: the two values of ``1 \pm x``, or ``1, 2`` before ``or 3``."""
    flat = (one for item in items for one in (item.items if isinstance(item, Group) and not item.opened else (item,)))
    return Group(opened, tuple(flat), closed)


def _element(tokens: list[str]) -> Any:
    first, last, inner = tokens[0], tokens[-1], tokens[1:-1]
    if first.startswith(r"\begin") and last == r"\end" + first[6:].partition("}")[0] + "}":
        lines = (line for line in _split(inner, (r"\\",))[0] if line and line != [r"\hline"])
        kind = first[7:-1] if "vmatrix" in first.lower() else "matrix"  # a determinant or a norm is a number
        return Group(kind, tuple(Group("row", tuple(map(_structure, _split(line, ("&",))[0]))) for line in lines))
    depths = [*itertools.accumulate((token in OPENING) - (token in CLOSING) for token in tokens)]
    if first in ("(", "[", r"\{") and last in (")", "]", r"\}") and all(depths[:-1]):  # the first closes at the last
        if inner and inner[0].startswith(r"\begin") and inner[-1].startswith(r"\end"):
            return _element(inner)
        parts, found = _split(inner, (",", ";"))
        if found or first == r"\{" or last != {"(": ")", "[": "]"}[first]:
            return _list(map(_structure, parts), first, last)
    if start := next((n for n, token in enumerate(tokens) if _FACTORS.match(token)), 0):
        return _multiplied(tokens[:start], tokens[start:])
    if len(tokens) == 1 and first in _SETS:
        return _SETS[first]
    if r"\pm" in tokens or r"\mp" in tokens:
        turned = [[{r"\pm": plus, r"\mp": minus}.get(t, t) for t in tokens] for plus, minus in ("+-", "-+")]
        return Group("", tuple(map(_scalar, turned)))
    return _scalar(tokens)


def _multiplied(factor: list[str], matrix: list[str]) -> Group:
    """A number, or a sign, times a matrix."""
    if factor[-1] in ("(", "[") and matrix[-1] in (")", "]"):
        factor, matrix = factor[:-1], matrix[:-1]
    factor = factor[:-1] if factor[-1:] and factor[-1] in (r"\cdot", r"\times", "*") else factor
    group = _element(matrix)
    if not factor or _split(factor[1:], ("+", "-"))[1] or not isinstance(group, Group) or group.opened != "matrix":
        raise NotMathematicsError("a matrix in an expression")
    number = sympy.Integer(-1) if factor == ["-"] else _exact(_scalar(factor))
    rows = [[_exact(item) for item in row.items] for row in group.items]
    if not all(isinstance(item, sympy.Expr) for row in rows for item in row):
        raise NotMathematicsError("a matrix of collections")
    return Group("matrix", tuple(Group("row", tuple(number * item for item in row)) for row in rows))


def _scalar(tokens: list[str]) -> Any:
    unsigned = tokens[1:] if tokens[0] in "+-" else tokens
    if len(unsigned) == 1 and re.fullmatch(r"\d*\.\d+", unsigned[0]):
        return Decimal(sympy.Rational("".join(tokens)), len(unsigned[0].replace(".", "").lstrip("0")) or 1)
    parser = _Parser(tokens)
    value = parser.fraction()
    if parser.place < len(tokens):
        raise NotMathematicsError(f"unexpected {tokens[parser.place]}")
    return value


REALS = Group("(", (-sympy.oo, sympy.oo), ")")
_SETS = {r"\emptyset": Group(r"\{", (), r"\}"), r"\Reals": REALS}
_SAME_NAMES = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
_UNARY: dict[str, Any] = {rf"\{name}": getattr(sympy, name) for name in _SAME_NAMES}
_UNARY |= {r"\arcsin": sympy.asin, r"\arccos": sympy.acos, r"\arctan": sympy.atan, r"\ln": sympy.log}
_UNARY |= {r"\log": lambda x: sympy.log(x, 10)}
_CONSTANTS = {r"\pi": sympy.pi, r"\infty": sympy.oo}
_TIMES = ("*", "/", r"\cdot", r"\times", r"\div")
_ENDS = CLOSING | {"+", "-", ",", "^", "_", "!", r"\over", r"\choose", *_TIMES}
_MAX_BITS = 4_000_000  # of a power that sympy writes out
_NAMED = re.compile(r"\\(?:text|mathbf|operatorname)\{([^{}]*)\}")
_TRANSPOSES = [(len(form), form) for t in ("T", r"\text{T}") for form in (["^", t], ["^", "{", t, "}"])]


class _Parser:
    r"""One expression. Juxtaposed factors bind more tightly than ``/`` and ``\cdot``: 1/2x is 1/(2x)."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self.place = tokens, 0
        self._bars = 0  # open absolute values

    def _next(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self._tokens[place] if 0 <= place < len(self._tokens) else ""

    def _take(self, *expected: str) -> bool:
        taken = self._next() in expected
        self.place += taken
        return taken

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise NotMathematicsError(f"{token} is missing")

    def fraction(self) -> Any:
        r"""``a \over b``, ``n \choose k``, or a sum."""
        value = self.sum()
        if self._take(r"\over"):
            return value / self.sum()
        return sympy.binomial(value, self.sum()) if self._take(r"\choose") else value

    def sum(self) -> Any:
        terms = [self._signed()]
        while self._next() in ("+", "-"):
            terms.append(self._signed())
        return sympy.Add(*terms)

    def _signed(self) -> Any:
        if self._take("-"):
            return -self._signed()
        return self._signed() if self._take("+") else self._product()

    def _product(self) -> Any:
        before, last = sympy.S.One, self._juxtaposed()
        while self._take(*_TIMES):
            sign = self._next(-1)
            factor = -self._juxtaposed() if self._take("-") else self._juxtaposed()
            if sign == r"\times":
                last = crossed(last, factor)
            else:
                before, last = before * last, 1 / factor if sign in ("/", r"\div") else factor
        return before * last

    def _juxtaposed(self, in_function: bool = False) -> Any:
        factors = [self._power()]
        while (token := self._next()) and token not in _ENDS and not (token == "|" and self._bars):
            if in_function and token in _UNARY:
                break
            if token[0].isdecimal() and self._next(-1)[0].isdecimal() and self._next(-2) not in ("^", "_"):
                raise NotMathematicsError("two numbers side by side")
            factors.append(self._power())
        return sympy.Mul(*factors)

    def _power(self) -> Any:
        value = self._atom()
        while True:
            if self._take("!"):
                value = sympy.Function("!!")(value) if self._take("!") else sympy.factorial(value)
            elif self._next() == "^" and self._next(1) == r"\circ":
                self.place += 2
                value = value * sympy.pi / 180
            elif self._take("^"):
                exponent = self._argument()
                large = value.is_Rational and exponent.is_Integer
                large = large and abs(exponent) * max(abs(value.p), value.q).bit_length() > _MAX_BITS
                value = (sympy.Function("power") if large else sympy.Pow)(value, exponent)
            else:
                return value

    def _argument(self, digits: bool = False) -> Any:
        r"""A group in braces or one token with its own arguments, as in TeX; ``digits``: of ``\frac12`` one digit."""
        token = self._next()
        if digits and token.isdecimal() and len(token) > 1:
            self._tokens = [*self._tokens[: self.place], token[0], token[1:], *self._tokens[self.place + 1 :]]
        if token[:1].isdecimal():
            self.place += 1
            return sympy.Rational(self._next(-1))
        return -self._atom() if self._take("-") else self._atom()

    def _group(self, opened: str) -> Any:
        self._expect(opened)
        self._bars += opened == "|"
        value = self.fraction() if opened == "{" else self.sum()
        self._bars -= opened == "|"
        self._expect(OPENING.get(opened, opened))
        return value

    def _atom(self) -> Any:
        token = self._next()
        if token in ("(", "[", "{", "|"):
            return sympy.Abs(self._group(token)) if token == "|" else self._group(token)
        self.place += 1
        if token[:1].isdecimal() or (token[:1] == "." and len(token) > 1):
            if self._next() == "_":
                return self._symbol(token)  # digits in a base
            if self._next() != r"\frac" or not token.isdecimal():
                return sympy.Rational(token)
            fraction = self._atom()
            return int(token) + fraction if fraction.is_Rational and 0 <= fraction < 1 else int(token) * fraction
        if token == r"\frac":
            return self._argument(digits=True) / self._argument(digits=True)
        if token == r"\binom":
            return sympy.binomial(self._argument(digits=True), self._argument(digits=True))
        if token == r"\sqrt":
            index = self._group("[") if self._next() == "[" else 2
            return sympy.Pow(self._argument(digits=True), sympy.S.One / index)
        if token in _UNARY:
            return self._function(token)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        role = token.role if isinstance(token, Name) else ""
        if token in ACCENTS:
            return self._symbol(f"{token}({self._raw()})", role)
        if named := _NAMED.fullmatch(token):
            return self._symbol(named[1].strip(), role)
        if token not in GREEK and (len(token) != 1 or not token.isalpha()):
            raise NotMathematicsError(f"unexpected {token or 'end'}")
        return self._symbol(token, role)

    def _function(self, name: str) -> Any:
        function, power = _UNARY[name], None
        self._put_index_first()
        if name == r"\log" and self._take("_"):
            base = self._script()
            function = lambda x: sympy.log(x, base)  # noqa: E731
        if self._take("^"):
            power = self._script()
            if power == -1 and (inverse := _UNARY.get(rf"\arc{name[1:]}")):
                function, power = inverse, None
        argument = self._group("(") if self._next() == "(" else self._juxtaposed(in_function=True)
        return function(argument) if power is None else sympy.Pow(function(argument), power)

    def _script(self) -> Any:
        r"""The base or power of a function: all digits of ``\log_10 2``, but the first of ``\log_23``, as in TeX."""
        following = self._next(1)
        nothing = not following or following in _ENDS - {"^"} or (following == "|" and self._bars > 0)
        return self._argument(digits=nothing)

    def _put_index_first(self) -> None:
        """Turn ``x^2_1`` into ``x_1^2``, if a power is next."""
        start = self.place
        if not self._take("^"):
            return
        self._raw()
        end = self.place
        if self._take("_"):
            self._raw()
            parts = slice(start), slice(end, self.place), slice(start, end), slice(self.place, None)
            self._tokens = [token for part in parts for token in self._tokens[part]]
        self.place = start

    def _raw(self) -> str:
        """The text of an argument, without blanks and braces."""
        start, depth = self.place, 0
        while depth or self.place == start:
            depth += (self._next() == "{") - (self._next() == "}")
            if not self._next():
                raise NotMathematicsError("an argument is missing")
            self.place += 1
        inside = [token for token in self._tokens[start : self.place] if token not in "{}"]
        return "".join(re.sub(r"^\\text\{(.*)\}$", r"\1", token) for token in inside)

    def _symbol(self, name: str, role: str = "") -> Any:
        """A letter with its index and primes: e, i, a symbol, or the value of an unknown function."""
        index, primes, power = "", "", ""
        if role != "function":
            self._put_index_first()
        while self._next() in ("_", "'") or (role == "function" and self._next() == "^"):
            if self._take("_"):
                index += self._raw()
            primes += "'" * self._take("'")
            power += f"^{self._raw()}" if self._next() == "^" and role == "function" and self._take("^") else ""
        if not index and not primes and name in ("e", "i"):
            return sympy.E if name == "e" else sympy.I
        name = f"{name}_{index}{primes}" if index or primes else name
        if role == "function":  # with its power, as in the name of the inverse
            return sympy.Function(name + power, real=True)(self._group(self._next()))
        if role == "operator" and self._next() not in _ENDS | {""}:
            return sympy.Function(name, real=True)(self._group("(") if self._next() == "(" else self._juxtaposed())
        if role == "matrix":
            transposed = "^T" if self._take_transpose() else ""
            return sympy.Symbol(name + transposed, commutative=False)
        return (Vector if role == "vector" else sympy.Symbol)(name, real=True)

    def _take_transpose(self) -> bool:
        following = [self._next(ahead) for ahead in range(4)]
        size = next((n for n, form in _TRANSPOSES if following[:n] == form), 0)
        self.place += size
        return bool(size)
