r"""Parse an answer in one spelling (:mod:`.normalise`): lists, intervals, sets, matrices, relations, expressions.

A recursive descent in one pass, without backtracking. Two symbols are equal only if their letter, case, alphabet,
index, accent and primes are. Sums over an index, integrals and limits are not read: they are no final answers. Runs in
worker processes only: sympy evaluates ``9^{9^{9^9}}`` while it is built.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy


class NotMathematicsError(ValueError):
    """The text is no answer that this parser knows."""


class Group(NamedTuple):
    r"""Elements between brackets: ``(a, b)``, ``[a, b)``, ``\{a, b\}``; without brackets a list."""

    opened: str
    items: tuple[Any, ...]
    closed: str


class SetOperation(NamedTuple):
    r"""Sets joined by one sign: ``\cup`` (also ``or`` between conditions), ``\cap`` (``and``) or ``\setminus``."""

    sign: str
    parts: tuple[Any, ...]


class Matrix(NamedTuple):
    rows: tuple[tuple[Any, ...], ...]


class Relation(NamedTuple):
    """A chain: ``sides[0] signs[0] sides[1] ...``; ``named`` if its left side, ``name``, is a symbol or ``f(x)``."""

    signs: tuple[str, ...]
    sides: tuple[Any, ...]
    name: str
    named: bool


class Decimal(NamedTuple):
    """A decimal that is a whole element and may be rounded."""

    value: sympy.Rational
    digits: int


_TOKEN = re.compile(
    r"(?:\d+(?:\.\d+)?|\.\d+)|\\begin\{\w+\}(?:\{[lcr| ]*\})?|\\end\{\w+\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\S"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_OPENING, _CLOSING = {*_BRACKETS, r"\{"}, {*_BRACKETS.values(), r"\}"}
_RELATIONS = frozenset(("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv"))
_OR, _AND = (r"\text{or}", r"\lor", r"\vee", "or"), (r"\text{and}", r"\land", r"\wedge", "and")
_SET_SIGNS = (r"\cup", r"\cap", r"\setminus")
_SETS = {r"\emptyset": sympy.S.EmptySet, r"\Reals": sympy.S.Reals}
_NAME = re.compile(r"(?:\\?[a-zA-Z]+|\\text\{[^{}]*\})'*(?:_(?:\w|\{\w+\}))?'*(?:\([^()]*\))?")
_INEQUALITIES = frozenset(("<", ">", r"\le", r"\ge", r"\ne"))


def parse(text: str) -> Any:
    """A sympy expression or set, a :class:`Decimal`, or one of the classes above; ``NotMathematicsError``."""
    text = re.sub(r"\\text\{\s*,?\s*(and|or)\s*\}|(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])", r"\\text{\1\2}", text)
    return _structure(_TOKEN.findall(text))


def _split(tokens: Sequence[str], signs: Sequence[str] | frozenset[str]) -> tuple[list[list[str]], list[str]]:
    """The parts between signs that are outside of brackets, and these signs."""
    parts: list[list[str]] = [[]]
    found, depth = [], 0
    for token in tokens:
        if token in _OPENING or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSING or token.startswith(r"\end"):
            depth -= 1
        if depth == 0 and token in signs:
            found.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def _structure(tokens: list[str]) -> Any:
    if not tokens:
        raise NotMathematicsError("an element is missing")
    for signs, joined in ((_OR, r"\cup"), (_AND, r"\cap")):
        parts, found = _split(tokens, signs)
        if found:
            items = tuple(_structure(part[:-1] if part[-1:] == [","] else part) for part in parts)
            if all(isinstance(item, Relation) and _INEQUALITIES.issuperset(item.signs) for item in items):
                return SetOperation(joined, items)
            return Group("", tuple(_flat(items)), "")
    parts, found = _split(tokens, (",", ";"))
    if found:
        return Group("", tuple(_flat(map(_structure, parts))), "")
    parts, found = _split(tokens, _RELATIONS)
    if found == [r"\in"]:
        return _structure(parts[1])
    if found:
        name = "".join(parts[0])
        named = _NAME.fullmatch(name) is not None and name.partition("(")[0] not in _UNARY
        sides = sympy.S.Zero if named else _structure(parts[0]), *map(_structure, parts[1:])
        return Relation(tuple({r"\approx": "=", r"\equiv": "="}.get(sign, sign) for sign in found), sides, name, named)
    parts, found = _split(tokens, (":",))
    if found:
        return Group(":", tuple(map(_structure, parts)), ":")
    parts, found = _split(tokens, _SET_SIGNS)
    if found:
        if len(set(found)) > 1:
            raise NotMathematicsError("two set operations")
        return SetOperation(found[0], tuple(map(_structure, parts)))
    return _element(tokens)


def _flat(items: Any) -> list[Any]:
    r"""Lists within a list as one: the two values of ``1 \pm x``, or ``1, 2`` before ``or 3``."""
    return [one for item in items for one in (item.items if isinstance(item, Group) and not item.opened else (item,))]


def _element(tokens: list[str]) -> Any:
    if len(tokens) == 1 and tokens[0] in _SETS:
        return _SETS[tokens[0]]
    first, last, inner = tokens[0], tokens[-1], tokens[1:-1]
    if first.startswith(r"\begin") and last == r"\end" + first[6:].partition("}")[0] + "}":
        return _matrix(inner)
    if first in ("(", "[", r"\{") and last in (")", "]", r"\}") and _encloses(tokens):
        if inner and inner[0].startswith(r"\begin") and inner[-1].startswith(r"\end"):
            return _element(inner)
        parts, found = _split(inner, (",", ";"))
        if found or first == r"\{" or last != {"(": ")", "[": "]"}[first]:
            return Group(first, tuple(_flat(map(_structure, parts))), last)
    if r"\pm" in tokens or r"\mp" in tokens:
        turned = [[{r"\pm": plus, r"\mp": minus}.get(t, t) for t in tokens] for plus, minus in ("+-", "-+")]
        return Group("", tuple(map(_scalar, turned)), "")
    return _scalar(tokens)


def _encloses(tokens: list[str]) -> bool:
    """Whether the first bracket is closed by the last one."""
    depths = itertools.accumulate((token in _OPENING) - (token in _CLOSING) for token in tokens)
    return all(list(depths)[:-1])


def _matrix(tokens: list[str]) -> Matrix:
    lines, _ = _split(tokens, (r"\\",))
    rows = [
        tuple(_structure(cell) for cell in _split(line, ("&",))[0]) for line in lines if line and line != [r"\hline"]
    ]
    if not rows or len({len(row) for row in rows}) > 1:
        raise NotMathematicsError("a matrix whose rows differ in length")
    return Matrix(tuple(rows))


def _scalar(tokens: list[str]) -> Any:
    unsigned = tokens[1:] if tokens[0] in "+-" else tokens
    if len(unsigned) == 1 and re.fullmatch(r"\d*\.\d+", unsigned[0]):
        return Decimal(sympy.Rational("".join(tokens)), len(unsigned[0].replace(".", "").lstrip("0")) or 1)
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.place < len(tokens):
        raise NotMathematicsError(f"unexpected {tokens[parser.place]}")
    return value


_GREEK = r"""
\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu
\xi \varpi \rho \varrho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda
\Xi \Pi \Sigma \Upsilon \Phi \Psi \Omega \ell \hbar
"""
_DRESSES = "bar vec hat tilde dot ddot mathbb mathcal mathfrak triangle angle"
_ACCENTS = {rf"\{name}": name for name in _DRESSES.split()}
_ACCENTS |= {r"\overline": "bar", r"\overrightarrow": "vec", r"\widehat": "hat", r"\widetilde": "tilde"}
_SAME_NAMES = "sin cos tan cot sec csc sinh cosh tanh exp"
_UNARY: dict[str, Any] = {rf"\{name}": getattr(sympy, name) for name in _SAME_NAMES.split()}
_UNARY |= {r"\arcsin": sympy.asin, r"\arccos": sympy.acos, r"\arctan": sympy.atan, r"\ln": sympy.log}
_UNARY |= {r"\log": lambda x: sympy.log(x, 10)}
_MAX_BITS = 4_000_000  # of a power that sympy writes out
_CONSTANTS = {r"\pi": sympy.pi, r"\infty": sympy.oo}
_INVERSES = {r"\sin": sympy.asin, r"\cos": sympy.acos, r"\tan": sympy.atan}
_ENDS = _CLOSING | {"+", "-", "*", "/", r"\cdot", r"\times", r"\div", ",", "^", "_", "!"}


class _Parser:
    r"""One expression. Juxtaposed factors bind more tightly than ``/`` and ``\cdot``: 1/2x is 1/(2x)."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self.place = tokens, 0
        self._bars = 0  # open absolute values
        self._angles = 0  # open trigonometric functions, in which degrees are turned into radians

    def _next(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self._tokens[place] if 0 <= place < len(self._tokens) else ""

    def _take(self, *expected: str) -> bool:
        if self._next() in expected:
            self.place += 1
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise NotMathematicsError(f"{token} is missing")

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
        value = self._juxtaposed()
        while self._next() in ("*", "/", r"\cdot", r"\times", r"\div"):
            operator = self._next()
            self.place += 1
            factor = -self._juxtaposed() if self._take("-") else self._juxtaposed()
            value = value / factor if operator in ("/", r"\div") else value * factor
        return value

    def _juxtaposed(self, in_function: bool = False) -> Any:
        factors = [self._power()]
        while (token := self._next()) and token not in _ENDS and not (token == "|" and self._bars):
            if in_function and token in _UNARY:
                break
            if token[0].isdigit() and self._next(-1)[0].isdigit() and self._next(-2) not in ("^", "_"):
                raise NotMathematicsError("two numbers side by side")
            factors.append(self._power())
        return sympy.Mul(*factors)

    def _power(self) -> Any:
        value = self._atom()
        while True:
            if self._take("!"):
                if self._next() == "!" and self._tokens[self.place - 2] == ")":
                    raise NotMathematicsError("a double factorial of brackets")
                value = sympy.factorial2(value) if self._take("!") else sympy.factorial(value)
            elif self._next() == "^" and self._next(1) == r"\circ":
                self.place += 2
                value = value * sympy.pi / 180 if self._angles else value
            elif self._take("^"):
                value = self._raised(value, self._argument())
            else:
                return value

    def _raised(self, base: Any, exponent: Any) -> Any:
        if base.is_Rational and exponent.is_Integer and abs(exponent) * max(base.p, base.q).bit_length() > _MAX_BITS:
            raise NotMathematicsError("a number with too many digits")
        return sympy.Pow(base, exponent)

    def _argument(self) -> Any:
        """A group in braces or one token with its own arguments, as in TeX; round brackets too: 2^(n+1)."""
        token = self._next()
        if token[:1].isdigit():  # 2^10 is meant as it looks; \frac12 is split
            self.place += 1
            return sympy.Rational(token)
        sign = -1 if self._take("-") else 1
        return sign * self._atom()

    def _digit_or_argument(self) -> Any:
        token = self._next()
        if token.isdigit() and len(token) > 1:
            self._tokens = [*self._tokens[: self.place], *token, *self._tokens[self.place + 1 :]]
        return self._argument()

    def _group(self, opened: str) -> Any:
        self._expect(opened)
        value = self.sum()
        self._expect(_BRACKETS[opened])
        return value

    def _atom(self) -> Any:
        token = self._next()
        if token in ("(", "[", "{"):
            return self._group(token)
        self.place += 1
        if token == "|":
            self._bars += 1
            value = sympy.Abs(self.sum())
            self._bars -= 1
            self._expect("|")
            return value
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return self._number(token)
        if token == r"\frac":
            return self._digit_or_argument() / self._digit_or_argument()
        if token == r"\binom":
            return sympy.binomial(self._digit_or_argument(), self._digit_or_argument())
        if token == r"\sqrt":
            index = self._group("[") if self._next() == "[" else 2
            return sympy.Pow(self._digit_or_argument(), sympy.S.One / index)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _UNARY:
            return self._function(token)
        if token in _ACCENTS:
            return self._symbol(f"{_ACCENTS[token]}({self._raw()})")
        if token.startswith(r"\text{"):
            return self._symbol(token[6:-1].strip())
        if (token.startswith("\\") and token in _GREEK.split()) or (len(token) == 1 and token.isalpha()):
            return self._symbol(token)
        raise NotMathematicsError(f"unexpected {token or 'end'}")

    def _number(self, token: str) -> Any:
        value = sympy.Rational(token)
        if self._next() == "_":
            return self._symbol(token)  # digits in another base, which have no value here
        if self._next() == r"\frac" and value.is_Integer:
            self.place += 1
            top, bottom = self._digit_or_argument(), self._digit_or_argument()
            mixed = top.is_Integer and bottom.is_Integer and 0 <= top < bottom
            return value + top / bottom if mixed else value * top / bottom
        return value

    def _function(self, name: str) -> Any:
        function, power = _UNARY[name], None
        if name == r"\log" and self._take("_"):
            base = self._argument()
            function = lambda x: sympy.log(x, base)  # noqa: E731
        if self._take("^"):
            power = self._argument()
            if power == -1 and name in _INVERSES:
                function, power = _INVERSES[name], None
        self._angles += 1
        argument = self._group("(") if self._next() == "(" else self._juxtaposed(in_function=True)
        self._angles -= 1
        return function(argument) if power is None else sympy.Pow(function(argument), power)

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

    def _symbol(self, name: str) -> Any:
        """A letter with its index and primes: e, i, a symbol, or the value of an unknown function."""
        index, primes = "", 0
        while True:
            if self._take("_"):
                index += self._raw()
            elif self._take("'"):
                primes += 1
            else:
                break
        if not index and not primes and name in ("e", "i"):
            return sympy.E if name == "e" else sympy.I
        name = f"{name}_{index}{primes * chr(39)}" if index or primes else name
        if name.rstrip("'") in {*"fgh"} and self._next() == "(":
            return sympy.Function(name)(self._group("("))
        return sympy.Symbol(name, real=True)
