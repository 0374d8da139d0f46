r"""The tokens of an answer, and how the gold answer reads them.

Notation is ambiguous: ``n(n+1)`` is a product, ``I(0)`` the value of a function, ``A^TB`` a product of matrices,
``1944-06-06`` a date. A :class:`Reading` decides by the gold answer, and marks the tokens of both sides, so that the
parser reads them alike. The rules are in docs/grading.md.
"""

import functools
import re
import string
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coca_mindspeed.grading.math.normalise import FUNCTION_NAMES

Role = Literal["function", "operator", "vector", "matrix"]


class Name(str):
    """A token of a name with a role: applied to a bracket, applied to a factor, a vector, or a matrix."""

    __slots__ = ("role",)
    role: Role

    def __new__(cls, text: str, role: Role) -> "Name":
        name = super().__new__(cls, text)
        name.role = role
        return name


_LETTERS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi varpi rho varrho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
GREEK = tuple(rf"\{name}" for name in _LETTERS.split())
_ACCENT_NAMES = "bar vec hat tilde dot ddot mathcal mathfrak triangle angle overline"
ACCENTS = frozenset(rf"\{name}" for name in _ACCENT_NAMES.split())
OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
CLOSING = frozenset(OPENING.values())

_TOKEN = re.compile(
    r"(?:\d+(?:\.\d+)?|\.\d+)|\\begin\{\w+\}(?:\{[lcr| ]*\})?|\\end\{\w+\}"
    r"|\\(?:text|mathbf|operatorname)\{[^{}]*\}|\\[a-zA-Z]+|\\.|\S"
)
_WORD = re.compile(r"\\text\{\s*,?\s*(and|or)\s*\}|(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])")
#: Functions for which a Greek letter stands, unless it stands without a bracket too.
_GREEK_FUNCTIONS = frozenset((r"\Phi", r"\Gamma", r"\delta", r"\phi", r"\varphi", r"\zeta"))
_USUAL_FUNCTIONS = frozenset("fghFGH")
_CONSTANTS = frozenset(("e", "i"))
_NAMED_OPERATOR = re.compile(r"\\text\{\s*(?!(?:and|or)\s*\})[a-zA-Z]{2,}\s*\}|\\operatorname\{[^{}]*\}")
_ONE_LETTER = re.compile(r"\\(?:text|mathbf|operatorname)\{\s*([a-zA-Z])\s*\}")
_POINT_NAMES = frozenset((r"\triangle", r"\angle", r"\overline"))
_KNOWN_FUNCTION = re.compile(rf"\\(?:{FUNCTION_NAMES}|sqrt)")
_SEVERAL_OR_CONDITION = frozenset((",", ";", "|", "=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", ":"))
_ELEMENT_ENDS = frozenset((",", ";", r"\text{and}", r"\text{or}"))

# 1944 - 06 - 06, 2025 / 5 / 22 and 192.168 .0 .1, as tokens with blanks between; LaTeX's -- is one dash.
_PART = r"\d+(?:\.\d+)?(?: \.\d+)*"
_JOINED = re.compile(rf"{_PART}(?:(?: -){{1,3}} {_PART}| [:/] {_PART})*")
_DASH = re.compile(r" -(?: -){0,2} ")
_SLASHES = re.compile(r"/ [\d.]+ /")
_WRITTEN = re.compile(rf" - |{_SLASHES.pattern}|\.\d+ \.")


def joined_numbers(tokens: Sequence[str]) -> str:
    """``1944-06-06`` if these are numbers joined by a dash, by two ``/`` or by two points, else an empty string.

    A ratio alone (``1:2``) is none: the parser reads it as such.
    """
    text = " ".join(tokens)
    if not _JOINED.fullmatch(text):
        return ""
    text = _DASH.sub(" - ", text)
    is_fraction = "/" in text and not _SLASHES.search(text)
    return text.replace(" ", "") if _WRITTEN.search(text) and not is_fraction else ""


class _Use(NamedTuple):
    """A name in an answer; ``inside`` is the content of the bracket behind it, or None."""

    place: int
    key: str  # letter, accent, index and primes
    power: tuple[str, ...]
    inside: tuple[str, ...] | None
    bracket: str
    is_operator: bool  # set as the name of a function


def _after_argument(tokens: Sequence[str], place: int) -> int:
    """The place behind an argument: a group in brackets or one token; a sign takes the next token with it."""
    if place < len(tokens) and tokens[place] == "-":
        place += 1
    if place >= len(tokens) or tokens[place] not in OPENING:
        return min(place + 1, len(tokens))
    opened, depth = tokens[place], 0
    for end in range(place, len(tokens)):
        depth += (tokens[end] == opened) - (tokens[end] == OPENING[opened])
        if depth == 0:
            return end + 1
    return len(tokens)


def _letter(token: str) -> str:
    r"""The letter or name of a token, or an empty string: ``x``, ``\phi``, ``x`` of ``\mathbf{x}``, ``\text{Var}``."""
    if len(token) == 1:
        return token if token.isalpha() else ""
    if one := _ONE_LETTER.fullmatch(token):
        return one[1]
    return token if token in GREEK or _NAMED_OPERATOR.fullmatch(token) else ""


def _name_end(tokens: Sequence[str], place: int, with_power: bool = True) -> tuple[str, tuple[str, ...], int]:
    """Index and primes behind a letter, its power, and the place behind them."""
    key, power = "", tuple[str, ...]()
    while place < len(tokens) and (tokens[place] in ("_", "'") or (tokens[place] == "^" and with_power)):
        end = place + 1 if tokens[place] == "'" else _after_argument(tokens, place + 1)
        part = tuple(token for token in tokens[place + 1 : end] if token not in ("{", "}"))
        if tokens[place] == "^":
            if power:
                break
            power = part
        else:
            key += tokens[place] + "".join(part)
        place = end
    return key, power, place


def _uses(tokens: Sequence[str]) -> Iterator[_Use]:
    place = 0
    while place < len(tokens):
        token, start = tokens[place], place
        letter = _letter(token)
        place += 1
        if token in ACCENTS:
            place = _after_argument(tokens, place)
            below = "".join(part for part in tokens[start + 1 : place] if part not in "{}")
            letter = "" if token in _POINT_NAMES else token + below
        elif token == "_":
            place = _after_argument(tokens, place)
        if not letter:
            continue
        key, power, end = _name_end(tokens, place)
        if letter in _CONSTANTS and not key:
            continue
        bracket = tokens[end] if end < len(tokens) and tokens[end] in ("(", "[") else ""
        if tokens[end + 1 : end + 2] and tokens[end + 1].startswith(r"\begin"):
            bracket = ""  # a matrix
        inside = tuple(tokens[end + 1 : _after_argument(tokens, end) - 1])
        is_operator = _NAMED_OPERATOR.fullmatch(token) is not None
        yield _Use(start, letter + key, power, inside if bracket else None, bracket, is_operator)


def _terms(tokens: Sequence[str]) -> int:
    """The number of terms of a sum, counting a leading sign as one more."""
    depth, terms = 0, 1
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        terms += depth == 0 and token in ("+", "-", r"\pm", r"\mp")
    return terms


def _is_function(uses: Sequence[_Use], stands_alone: bool) -> bool:
    """Whether a name of the gold answer that stands before brackets is a function, by the first rule that fits."""
    key = uses[0].key
    letter = re.sub(r"[_'].*", "", key)
    if any(use.is_operator for use in uses) or (letter in _GREEK_FUNCTIONS and not stands_alone):
        return True
    if any((use.bracket == "[" and letter.isupper()) or _has_several(use.inside or ()) for use in uses):
        return True
    plain = [use.inside or () for use in uses if not use.power]
    if any(inside and not {"+", "-", r"\pm", r"\mp"} & {*inside} for inside in plain):
        return True
    if stands_alone:
        return False
    inverse = [use.inside or () for use in uses if use.power == ("-", "1")]
    return any(inside and _terms(inside) == 1 for inside in plain + inverse) or letter in _USUAL_FUNCTIONS


def _has_several(inside: Sequence[str]) -> bool:
    depth = 0
    for token in inside:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in _SEVERAL_OR_CONDITION and not (token == "|" and inside.count("|") % 2 == 0):
            return True
    return False


_OF_MATRICES = (("T",), (r"\text{T}",), ("-", "1"))
_DIFFERENTIAL = {"d": "d", r"\text{d}": "d", r"\Delta": r"\Delta"}
# dx, d y, dxdy; in cd, de or width the d is a letter like others.
_DIFFERENTIAL_WORDS = re.compile(r"(?<![a-zA-Z])(?:d *[p-z] *){1,3}(?![a-zA-Z])")


def _derivative(top: Sequence[str], bottom: Sequence[str]) -> list[str] | None:
    r"""``d^2/dx^2`` as an operator with its operand, of the two sides of ``\frac{d^2y}{dx^2}``; None for a fraction."""
    if not top or len(bottom) < 2 or top[0] not in _DIFFERENTIAL or bottom[0] not in _DIFFERENTIAL:
        return None
    start = _after_argument(top, 2) if top[1:2] == ["^"] else 1
    order, operand = "".join(top[1:start]), top[start:]
    variable, (_, _, end) = _letter(bottom[1]), _name_end(bottom, 2)
    if not variable or end < len(bottom) or not _is_operand(operand):
        return None
    below = f"{_DIFFERENTIAL[bottom[0]]} {variable}{''.join(bottom[2:])}"
    operator = re.sub("[{}]", "", f"{_DIFFERENTIAL[top[0]]}{order}/{below}")
    return [Name(rf"\text{{{operator}}}", "operator"), *(["(", *operand, ")"] if operand else [])]


def _is_operand(tokens: Sequence[str]) -> bool:
    """Whether a numerator's rest is nothing, one letter, or a function of something."""
    if not tokens:
        return True
    start = 0
    if tokens[0] in ACCENTS:
        start = _after_argument(tokens, 1)
    elif _letter(tokens[0]):
        start = 1
    elif _KNOWN_FUNCTION.fullmatch(tokens[0]):  # \sin x
        return True
    start = _name_end(tokens, start)[2] if start else 0
    return start == len(tokens) or (tokens[start] in ("(", "[") and _after_argument(tokens, start) == len(tokens))


def _with_derivatives(tokens: list[str]) -> list[str]:
    r"""The tokens with ``\frac{dy}{dx}`` and ``dy/dx`` as an operator that is applied to its operand."""
    if _DIFFERENTIAL.keys().isdisjoint(tokens):
        return tokens
    for place, token in reversed([*enumerate(tokens)]):
        middle = end = place
        if token == r"\frac":
            middle = _after_argument(tokens, place + 1)
            end = _after_argument(tokens, middle)
        elif token in _DIFFERENTIAL or (token == "(" and not (place and _letter(tokens[place - 1]))):
            middle = _side_end(tokens, place)
            end = _side_end(tokens, middle + 1) if tokens[middle : middle + 1] == ["/"] else place
        if end > place:
            sides = tokens[place + (token == r"\frac") : middle], tokens[middle + (token != r"\frac") : end]
            if found := _derivative(*map(_unwrapped, sides)):
                tokens = [*tokens[:place], *found, *tokens[end:]]
    return tokens


def _side_end(tokens: Sequence[str], place: int) -> int:
    """The place behind ``dy``, ``d^2y``, ``dx^2``, ``df(x)`` or a group in round brackets."""
    if tokens[place : place + 1] == ["("]:
        return _after_argument(tokens, place)
    if place >= len(tokens) or tokens[place] not in _DIFFERENTIAL:
        return place
    place += 1
    if tokens[place : place + 1] == ["^"]:
        place = _after_argument(tokens, place + 1)
    if place < len(tokens) and _letter(tokens[place]):
        place = _name_end(tokens, place + 1)[2]
        following = _after_argument(tokens, place)
        if tokens[place : place + 1] == ["("] and tokens[following : following + 1] == ["/"]:
            place = following
    return place


def _unwrapped(tokens: Sequence[str]) -> list[str]:
    """The tokens without brackets around all of them, or around the first one: ``{d}x``."""
    while tokens and tokens[0] in ("(", "{") and _after_argument(tokens, 0) == len(tokens):
        tokens = tokens[1:-1]
    return [tokens[1], *tokens[3:]] if tokens[:1] == ["{"] and tokens[2:3] == ["}"] else [*tokens]


def _elements(tokens: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Start and end of the elements of a list without brackets."""
    start, depth = 0, 0
    for place, token in enumerate(tokens):
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in _ELEMENT_ENDS:
            yield start, place
            start = place + 1
    yield start, len(tokens)


def _tokens(text: str) -> list[str]:
    return _with_derivatives(_TOKEN.findall(_WORD.sub(r"\\text{\1\2}", text)))


@dataclass(frozen=True)
class Reading:
    r"""How a gold answer and its answers are read.

    Attributes:
        arithmetic: numbers joined by dashes, slashes or points are computed.
        as_written: they are not, because the gold answer consists of such; otherwise only two dashes make a date.
        functions: names that are applied to the bracket behind them, wherever there is one.
        factors: the other names of the gold answer.
        differentials: ``d`` and ``\Delta`` if they stand only directly before the letter of a variable.
        vectors: bold letters.
        has_matrices: letters do not commute.
    """

    arithmetic: bool = False
    as_written: bool = False
    functions: frozenset[str] = frozenset()
    factors: frozenset[str] = frozenset()
    differentials: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    has_matrices: bool = False

    @classmethod
    @functools.lru_cache(maxsize=1_024)
    def of(cls, gold: str, arithmetic: bool = False) -> "Reading":
        tokens = _tokens(gold)
        uses = defaultdict[str, list[_Use]](list)
        alone = set()
        for use in _uses(tokens):
            if use.inside is None:
                alone.add(use.key)
            else:
                uses[use.key].append(use)
        functions = frozenset(key for key, before in uses.items() if _is_function(before, key in alone))
        bold = frozenset(_letter(token) for token in tokens if token.startswith(r"\mathbf{"))
        return cls(
            arithmetic=arithmetic,
            as_written=not arithmetic and any(joined_numbers(tokens[start:end]) for start, end in _elements(tokens)),
            functions=functions,
            factors=frozenset(alone | uses.keys()) - functions,
            differentials=_differentials(gold),
            vectors=bold,
            has_matrices=any(
                use.power in _OF_MATRICES
                and (use.key[0] in string.ascii_uppercase or tokens[use.place].startswith(r"\mathbf"))
                and use.key not in functions
                for use in _uses(tokens)
            ),
        )

    def tokens(self, text: str) -> list[str]:
        """The tokens of a gold answer or an answer, with marks for the parser."""
        tokens = self._with_differentials(_tokens(text))
        for use in [*_uses(tokens)]:
            token = tokens[use.place]
            if use.inside is not None and (use.key in self.functions or use.key not in self.factors):
                tokens[use.place] = Name(token, "function")
            elif self.has_matrices and re.fullmatch(r"[a-zA-Z]|\\(?:mathbf|text)\{\s*[a-zA-Z]\s*\}", token):
                tokens[use.place] = Name(token, "matrix")
            elif token == r"\vec" or _letter(token) in self.vectors:
                tokens[use.place] = Name(token, "vector")
        return tokens if self.arithmetic else self._with_joined_numbers(tokens)

    def _with_joined_numbers(self, tokens: list[str]) -> list[str]:
        for start, end in reversed([*_elements(tokens)]):
            text = joined_numbers(tokens[start:end])
            if text and (self.as_written or len(re.findall("-+", text)) > 1):
                tokens[start:end] = [rf"\text{{{re.sub('-+', '-', text)}}}"]
        return tokens

    def _with_differentials(self, tokens: list[str]) -> list[str]:
        """``dx`` becomes one name where the gold answer has differentials."""
        place = 0
        while self.differentials and place < len(tokens) - 1:
            if _DIFFERENTIAL.get(tokens[place]) in self.differentials and (letter := _letter(tokens[place + 1])):
                index, _, end = _name_end(tokens, place + 2, with_power=False)
                tokens[place:end] = [rf"\text{{{_DIFFERENTIAL[tokens[place]]} {letter}{index}}}"]
            place += 1
        return tokens


def _differentials(text: str) -> frozenset[str]:
    r"""``d`` if each is upright or begins ``dx`` apart from other letters; ``\Delta`` if a letter follows each."""
    tokens = _tokens(text)
    bare = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+", lambda match: " x " if match[0] in GREEK else " ", text)
    words = "".join(match[0] for match in _DIFFERENTIAL_WORDS.finditer(bare))
    plain = bare.count("d") == words.count("d") and "c" not in bare
    upright = r"\text{d}" in tokens
    kinds = {"d"} if plain and ("d" in tokens or upright) else set()
    deltas = [place for place, token in enumerate(tokens) if token == r"\Delta"]
    if deltas and all(_letter("".join(tokens[place + 1 : place + 2])) for place in deltas):
        kinds.add(r"\Delta")
    return frozenset(kinds)
