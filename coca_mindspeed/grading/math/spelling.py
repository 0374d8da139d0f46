r"""Rewrite alternative spellings of a final answer as the parser and the exact path read them.

``\frac\pi4`` becomes ``\frac{\pi}{4}``, ``\operatorname{ln}3`` becomes ``\ln 3``, ``[2,5[`` becomes ``[2,5)``. Nothing
is evaluated; the time is linear in the text.
"""

import re

TEXT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|rm|operatorname)\s*\{([^{}]*)\}"

_COMMANDS = {r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\nicefrac": r"\frac"}
_COMMANDS |= {r"\sfrac": r"\frac", r"\ast": r"\cdot ", r"\uppi": r"\pi ", r"\lg": r"\log_{10} ", r"\R": r"\mathbb{R}"}
_COMMAND = re.compile(r"\\(?:[lr]brace|[lr]brack|nicefrac|sfrac|ast|uppi|lg|R)(?![a-zA-Z])")
_POWER_SIGN = re.compile(r"(?<=[\w)}\]])(?:\*\*| \*\* )(?=[\w({\\-])")

# Longer names first. "sec" is also a unit, and a function only where it cannot be one.
_INVERSES = "|".join(f"arc{name}" for name in ("sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc"))
_NAMES = rf"{_INVERSES}|sinh|cosh|tanh|sin|cos|tan|cot|csc|log|ln|exp"
_NAMED_FUNCTION = re.compile(
    rf"\\(?:operatorname\*?\s*\{{\s*\\?({_NAMES}|sec)\s*\}}|(?:mathrm|text|textrm|mathop)\s*\{{\s*\\?({_NAMES})\s*\}})"
)
_PLAIN_FUNCTION = re.compile(
    rf"(?<![a-zA-Z\\])(?:({_NAMES})(?=\s*[({{\\\d^_]|\s+[a-zA-Z](?![a-zA-Z]))|(sec)(?=\())", re.ASCII
)
_PLAIN_LOG_10 = re.compile(r"(?<![a-zA-Z\\])lg(?=\s*[(\\\d]|\s+[a-zA-Z](?![a-zA-Z]))|\\operatorname\s*\{\s*lg\s*\}")
_PLAIN_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*(?:(\d+(?:\.\d+)?)|(?=[({\[\\]|[a-zA-Z](?![a-zA-Z])))")
_PLAIN_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")
_CONSTANT = re.compile(r"\\(?:mathrm|operatorname|text|textrm|mathit)\s*\{\s*(e|i|\\pi)\s*\}")
_ROMAN = re.compile(r"\{\s*\\rm(?![a-zA-Z])\s*([^{}]*)\}")
_NATURAL_LOG = re.compile(r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![a-zA-Z]))")
_LOG_10 = re.compile(r"\\log\s*_\s*10(?!\d)")  # in TeX the index is the 1 alone
_DOUBLE_FACTORIAL = re.compile(r"(?<![\d.!])(\d{1,3})!!(?!!)")
_MAX_DOUBLE_FACTORIAL = 200

# Number of arguments, each a group in braces or a single token.
_ARGUMENTS = {"^": 1, r"\frac": 2, r"\dfrac": 2, r"\tfrac": 2, r"\cfrac": 2, r"\binom": 2, r"\dbinom": 2, r"\tbinom": 2}
_ARGUMENTS |= {r"\sqrt": 1, r"\overline": 1, r"\bar": 1, r"\vec": 1, r"\hat": 1, r"\text": 1, r"\mathbb": 1}
_ARGUMENTS |= {r"\mathrm": 1, r"\mathbf": 1, r"\mathit": 1}
_LACKS_BRACES = re.compile(
    r"\\(?:(?:[dtc]?frac|[dt]?binom)(?![a-zA-Z])|(?:sqrt|overline|bar|vec|hat|text|math(?:bb|rm|bf|it))(?! *\{))"
    r"|\^ ?[\\(]"
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|.", re.DOTALL)
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_NO_ARGUMENT = frozenset((r"\circ", r"\prime", r"\cdot", r"\times", r"\div", r"\le", r"\ge", r"\right", r"\left"))

_VARIABLE = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|varphi|omega))"
_RELATION = r"(?:<|>|\\(?:leq?slant|geq?slant|leqq?|geqq?|le|ge|lt|gt|neq?)(?![a-zA-Z]))"
_SET_OF_SOLUTIONS = re.compile(
    rf"\\\{{\s*({_VARIABLE})\s*(?:\\in\s*\\mathbb\s*\{{\s*R\s*\}}\s*)?"
    rf"(?:\\(?:mid|vert|colon)(?![a-zA-Z])|[|:]|\\text\s*\{{\s*such that\s*\}})(.+)\\\}}"
)
_SIGN = re.compile(rf"({_RELATION})")
_STRICT = ("<", ">", r"\lt", r"\gt")
_AND = re.compile(r"\s*(?:\\text\s*\{\s*,?\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z]))\s*")
_OR = re.compile(r"\s*\\(?:lor|vee)(?![a-zA-Z])\s*")
_BOUND = re.compile(rf"([^<>]*?)\s*({_RELATION})\s*([^<>]*)")
_CUP = re.compile(r"\s*\\cup(?![a-zA-Z])\s*")
_ELEMENT_OF = re.compile(rf"{_VARIABLE}\s*\\in(?![a-zA-Z])\s*")

_BASE_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {word: str(base) for base, word in enumerate(_BASE_WORDS.split(), start=2)}
_BASE = rf"(\d{{1,2}}|{'|'.join(_BASES)})"
_DIGITS = r"(\(?\s*[0-9A-Fa-f.]+\s*\)?)\s*"
_BASE_BEHIND = re.compile(rf"{_DIGITS}(?:\(\s*(?:in\s+)?base[\s-]*{_BASE}\s*\)|(?:in\s+)?base[\s-]*{_BASE})")
_BASE_INDEX = re.compile(rf"{_DIGITS}_\s*\{{?\s*\(?\s*(?:base[\s-]*)?{_BASE}\s*\)?\s*\}}?")
_RESIDUE = re.compile(
    r"\s*(?:\\pmod(?![a-zA-Z])\s*\{?([^{}()]+)\}?|\(\s*\\?(?:b|p|op)?mod(?:ulo)?(?![a-zA-Z])\s*\{?([^{}()]+)\}?\s*\))$"
)
_REMAINDER = re.compile(r"(\d{1,50})\s*\\?b?mod(?:ulo)?(?![a-zA-Z])\s*\{?(\d{1,50})\}?$")


def standard_spelling(text: str) -> str:
    if "\\" in text or "^" in text:
        text = _COMMAND.sub(lambda match: _COMMANDS[match[0]], text)
        text = _ROMAN.sub(r"\\mathrm{\1}", text)
    text = _POWER_SIGN.sub("^", text)
    text = _PLAIN_ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt ", text)
    if _LACKS_BRACES.search(text):
        text = _with_braces(text)
    text = _NAMED_FUNCTION.sub(lambda match: rf"\{match[1] or match[2]} ", text)
    text = _PLAIN_LOG_10.sub(r"\\log_{10} ", text)
    text = _PLAIN_FUNCTION.sub(lambda match: rf"\{match[1] or match[2]} ", text)
    text = _PLAIN_PI.sub(r"\\pi ", text)
    text = _CONSTANT.sub(r"\1 ", text)
    text = _NATURAL_LOG.sub(r"\\ln ", _LOG_10.sub(r"\\log_{10} ", text))
    text = _DOUBLE_FACTORIAL.sub(_double_factorial, text)
    text = _in_standard_digits(_residue_class(text.strip()))
    return " ".join(_standard_set(text).split())


def _with_braces(text: str) -> str:
    r"""Put braces around single-token arguments, as in ``\frac\pi4``, ``\sqrt[3]2`` and ``2^\frac12``."""
    tokens = _TOKEN.findall(text)
    closing = _matching(tokens)
    if closing is None:
        return text
    opened, closed = [0] * (len(tokens) + 1), [0] * (len(tokens) + 1)
    ends = [0] * len(tokens)  # after the token and its arguments
    for place in range(len(tokens) - 1, -1, -1):
        token = tokens[place]
        end = closing.get(place, place) + 1 if token == "{" else place + 1
        for _ in range(_ARGUMENTS.get(token, 0)):
            start = _next(tokens, end)
            if token == r"\sqrt" and start < len(tokens) and tokens[start] == "[" and start in closing:
                start = _next(tokens, closing[start] + 1)
            if start >= len(tokens):
                break
            if tokens[start] == "{":
                end = ends[start]
            elif tokens[start] == "(" and token in ("^", r"\sqrt") and start in closing:
                end = closing[start] + 1
                opened[start], closed[end] = opened[start] + 1, closed[end] + 1
            elif _is_argument(tokens[start], token):
                end = ends[start]
                opened[start], closed[end] = opened[start] + 1, closed[end] + 1
            else:
                break
        ends[place] = end
    for place in filter(opened.__getitem__, range(1, len(tokens))):
        if tokens[place - 1].isspace():
            tokens[place - 1] = ""
    return "".join("}" * closed[n] + "{" * opened[n] + token for n, token in enumerate([*tokens, ""]))


def _is_argument(token: str, command: str) -> bool:
    if len(token) > 2 and token[0] == "\\":
        return token not in _NO_ARGUMENT
    return command != "^" and token.isalnum()


def _next(tokens: list[str], place: int) -> int:
    return place + 1 if place < len(tokens) and tokens[place].isspace() else place


def _matching(tokens: list[str]) -> dict[int, int] | None:
    """Position of the closing bracket for each opening one; None if braces do not match."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for place, token in enumerate(tokens):
        if token in _CLOSING:
            opened.append(place)
        elif token == "}":
            while opened and tokens[opened[-1]] != "{":  # (0,1] and [0,1) are no pairs
                opened.pop()
            if not opened:
                return None
            closing[opened.pop()] = place
        elif token in (")", "]") and opened and _CLOSING[tokens[opened[-1]]] == token:
            closing[opened.pop()] = place
    return None if any(tokens[place] == "{" for place in opened) else closing


def _double_factorial(match: re.Match[str]) -> str:
    """``n!!`` by factorials; the parser would read the factorial of a factorial."""
    number = int(match[1])
    if number > _MAX_DOUBLE_FACTORIAL:
        return match[0]
    half = (number + 1) // 2
    return rf"\frac{{{number + 1}!}}{{2^{{{half}}}{half}!}}" if number % 2 else rf"(2^{{{half}}}{half}!)"


def _residue_class(text: str) -> str:
    r"""``7 (mod 11)`` as ``7\pmod{11}``; without brackets only if 7 is also the remainder."""
    if "mod" not in text:
        return text
    plain = re.sub(TEXT, r"\1", text)
    if match := _RESIDUE.search(plain):
        return rf"{plain[: match.start()]}\pmod{{{(match[1] or match[2]).strip()}}}"
    match = _REMAINDER.fullmatch(plain)
    return rf"{match[1]}\pmod{{{match[2]}}}" if match and int(match[1]) < int(match[2]) else text


def _in_standard_digits(text: str) -> str:
    """``1011 (base 2)`` as ``1011_{2}``."""
    if "base" not in text and "_" not in text:
        return text
    plain = " ".join(re.sub(TEXT, r" \1 ", text).split())
    match = _BASE_BEHIND.fullmatch(plain) or _BASE_INDEX.fullmatch(plain)
    if match is None:
        return text
    digits, *bases = match.groups()
    base = next(filter(None, bases))
    return f"{digits}_{{{_BASES.get(base, base)}}}"


def _standard_set(text: str) -> str:
    if match := _SET_OF_SOLUTIONS.fullmatch(text):
        variable, condition = match[1], match[2].strip()
        if re.search(_RELATION, condition) and variable in condition:
            text = condition.replace(",", r" \text{ and } ")
            text = _interval(variable, _chain(text) or text) or text
    if re.search(_RELATION, text):
        if (parts := _OR.split(text))[1:] and all(re.search(_RELATION, part) for part in parts):
            text = r" \text{ or } ".join(parts)
        text = _chain(text) or text
    return _with_standard_brackets(text)


def _chain(text: str) -> str | None:
    r"""``2 < x \le 5`` of ``x > 2`` and ``x \le 5``, else None."""
    parts = _AND.split(text)
    bounds: dict[bool, tuple[str, str, str]] = {}  # upper and lower: variable, relation, value
    for part in parts:
        match = _BOUND.fullmatch(part.strip())
        if len(parts) != 2 or match is None or match[2].startswith(r"\n") or not (match[1] and match[3].strip()):
            return None
        left, sign, right = match[1], match[2], match[3].strip()
        is_upper = sign == "<" or sign.startswith(r"\l")
        relation = "<" if sign in _STRICT else r"\le"
        if re.fullmatch(_VARIABLE, left):
            bounds[is_upper] = (left, relation, right)
        elif re.fullmatch(_VARIABLE, right):
            bounds[not is_upper] = (right, relation, left)
        else:
            return None
    if len(bounds) < 2 or bounds[True][0] != bounds[False][0]:
        return None
    (variable, above, high), (_, below, low) = bounds[True], bounds[False]
    return f"{low} {below} {variable} {above} {high}"


def _interval(variable: str, condition: str) -> str | None:
    r"""``(2, 5]`` of ``2 < x \le 5``, which does not depend on the variable's name; else None."""
    parts = [part.strip() for part in _SIGN.split(condition)]
    signs = parts[1::2]
    if any(sign.startswith(r"\n") for sign in signs) or parts.count(variable) != 1 or not all(parts):
        return None
    greater = [sign.startswith((">", r"\g")) for sign in signs]
    if len(set(greater)) != 1 or any(_holds(variable, value) for value in parts[0::2] if value != variable):
        return None
    if greater[0]:
        parts.reverse()
    closed = [sign not in _STRICT for sign in parts[1::2]]
    place = parts.index(variable)
    if len(parts) > 5 or (len(parts) == 5 and place != 2):
        return None
    below = ("[" if closed[0] else "(") + parts[0] if place else r"(-\infty"
    above = parts[-1] + ("]" if closed[-1] else ")") if place + 1 < len(parts) else r"\infty)"
    return f"{below}, {above}"


def _holds(variable: str, text: str) -> bool:
    return re.search(rf"(?<![a-zA-Z\\]){re.escape(variable)}(?![a-zA-Z])", text) is not None


def _with_standard_brackets(text: str) -> str:
    """``]2,5]`` as ``(2,5]``, and a semicolon between elements as a comma."""
    element_of = _ELEMENT_OF.match(text)
    start = element_of.end() if element_of else 0
    pieces = [piece.strip() for piece in _CUP.split(text[start:])]
    if all(len(piece) > 2 and piece[0] in "[](" and piece[-1] in "[])" for piece in pieces) and any(
        piece[0] == "]" or piece[-1] == "[" for piece in pieces
    ):
        turned = []
        for piece in pieces:
            inside = piece[1:-1]
            comma = ";" if inside.count(";") == 1 else ","
            if inside.count(comma) != 1 or any(bracket in inside for bracket in "[]"):
                return text
            left = {"]": "("}.get(piece[0], piece[0])
            turned.append(left + inside.replace(comma, ",") + {"[": ")"}.get(piece[-1], piece[-1]))
        return text[:start] + r" \cup ".join(turned)
    if ";" in text and "," not in text and re.fullmatch(r"(?:[(\[]|\\\{)[^()\[\]]*(?:[)\]]|\\\})", text):
        return text.replace(";", ",")
    return text
