r"""One spelling for each sign of an answer: tables of rewriting rules, applied in order; nothing is evaluated.

The result is plain LaTeX for :mod:`.parse`, without dollars, sizes, spacing commands, text commands or Unicode signs.
"""

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from coca_mindspeed.grading.math import units

_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u034f\u061c\u180e\u2060\ufeff")) | dict.fromkeys(
    code for first, last in ((0x200B, 0x2010), (0x202A, 0x202F), (0x2061, 0x2070)) for code in range(first, last)
)
_COMMANDS = """× times; · cdot; ⋅ cdot; ÷ div; π pi; ∞ infty; ≤ le; ≥ ge; ≈ approx; ¬ neg; ≠ ne; ∪ cup; ∩ cap
∅ emptyset; ∈ in; ± pm; ℓ ell; ℏ hbar; ϖ varpi; ϑ vartheta; ϱ varrho; ℝ R; ℤ Z; √ sqrt
α alpha; β beta; γ gamma; δ delta; ε epsilon; θ theta; λ lambda; μ mu; ρ rho; σ sigma; τ tau; φ phi; ω omega; Ω Omega
Δ Delta; Π Pi; Σ Sigma; Φ Phi; Γ Gamma"""
_SIGNS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "°": r"^\circ ",
    "℃": r"^\circ C",
    "℉": r"^\circ F",
    "。": ".",
    "′": "'",
    "″": "''",
    "‴": "'''",
}
_SIGNS |= {sign: rf"\{name} " for sign, name in (entry.split() for entry in _COMMANDS.replace("\n", ";").split(";"))}
_SIGN = re.compile("[" + "".join(_SIGNS) + "]")


def _decomposed(kind: str) -> tuple[re.Pattern[str], dict[int, str]]:
    """The characters that Unicode derives from others by ``<super>`` or ``<sub>``, and what they stand for."""
    table = {}
    for code in (n for n in range(0xB2, 0x2C7E) if n != 0xBA):
        form, *plain = unicodedata.decomposition(chr(code)).split() or [""]
        if form == f"<{kind}>":
            table[code] = "".join(chr(int(each, 16)) for each in plain).replace("−", "-")
    return re.compile("[" + "".join(map(chr, table)) + "]+"), table


_RAISED, _LOWERED = _decomposed("super"), _decomposed("sub")
_VULGAR_FRACTION = re.compile(r"[¼½¾⅐-⅞]")


def _fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def plain_characters(text: str) -> str:
    """Drop invisible characters; superscripts, ``½`` and signs become LaTeX, and the rest its NFKC form."""
    if text.isascii():
        return text
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text.translate(_INVISIBLE))
    for (pattern, table), sign in ((_RAISED, "^"), (_LOWERED, "_")):
        text = pattern.sub(lambda m, t=table, s=sign: f"{s}{{{m[0].translate(t)}}}", text)  # type: ignore[misc]
    text = _SIGN.sub(lambda m: _SIGNS[m[0]], _VULGAR_FRACTION.sub(_fraction, text))
    return unicodedata.normalize("NFKC", text)


TEXT = (
    r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|boldsymbol|mbox|rm|bf|operatorname\*?)(?![a-zA-Z])"
)
_FUNCTIONS = "arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh sin cos tan cot sec csc log ln lg exp"
FUNCTION_NAMES = _FUNCTIONS.replace(" ", "|")
_NOT_IN_A_NAME = r"(?<![a-zA-Z\\])"


def _rules(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), new) for pattern, new in rules]


_NAMED_SIGNS = {"lbrace": r"\\{", "rbrace": r"\\}", "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")"}
_NAMED_SIGNS |= {"lt": "<", "gt": ">", "uppi": r"\\pi ", "ast": r"\\cdot "}
# Looks only: spacing, sizes, dollars, other names of one sign.
_LOOKS = _rules(
    (r"(\\\\)\s*\[[\d. -]{0,9}(?:pt|em|ex|mm|cm)\]", r"\1"),
    (r"(?<=\d)(?:(?<!\\)\\[,;:! ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands as LaTeX writes them
    (r"(\\\\)|\\[,;:! ]|\\(?:q?quad|displaystyle|textstyle|limits)(?![a-zA-Z])|(?<=[^\\\s])~|&nbsp;", r"\1 "),
    (r"\s+", " "),
    (r"\\(?:left|middle|right|[bB]igg?[lmr]?)(?![a-zA-Z])\s*\.?", ""),
    (r"^\s*\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]\s*$", r"\1"),
    (r"(?<!\\)\\[(\[]\s*([-+]?[\d.,/ ]+)\\[)\]]", r" \1 "),
    (r"(?<!\\)\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]", r"(\1)"),
    (r"\\[dtc]frac|\\[ns](?:ice)?frac", r"\\frac"),
    (r"\\[dt]binom", r"\\binom"),
    *((rf"\\{name}(?![a-zA-Z])", new) for name, new in _NAMED_SIGNS.items()),
    (r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\R(?![a-zA-Z])|\\mathbb\s*\{?\s*R\s*\}?", r"\\Reals "),
    (r"\\mathbb\s*\{?\s*Z\s*\}?", r"\\Z "),
    (r"(?<![{}])\{\s*\}", ""),
    (r"\^\s*\{?\s*\\prime(?![a-zA-Z])\s*\}?", "'"),
    (r"\{\s*(?::|\\colon)\s*\}|\\colon(?![a-zA-Z])", ":"),
    (r"\{?(\^)?\s*\{?\s*\\(?:circ|degree)(?![a-zA-Z])\s*([CF])?\s*\}?\}?", r"^\\circ \2"),
    (r"\{\s*\\(?:rm|bf)(?![a-zA-Z])\s*([^{}]*)\}", r"\\text{\1}"),
)
# Spellings of plain text and of programs.
_PLAIN = _rules(
    (r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({\\-])", "^"),
    (rf"{_NOT_IN_A_NAME}sqrt\s*(\d+)", r"\\sqrt{\1}"),
    (rf"{_NOT_IN_A_NAME}sqrt(?![a-zA-Z])", r"\\sqrt "),
    (rf"{TEXT}\s*\{{\s*\\?({FUNCTION_NAMES})\s*\}}", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}({FUNCTION_NAMES})(?=\s*[({{\\\d^_]|\s+[a-zA-Z](?![a-zA-Z]))", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}(pi|infty|cdot)(?![a-zA-Z])", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}(?:infinity|inf|oo)(?![a-zA-Z])|\\inf(?![a-zA-Z])", r"\\infty "),
    (rf"{TEXT}\s*\{{\s*(e|i|\\pi)\s*\}}", r"\1 "),
    (rf"{TEXT}\s*\{{\s*([\d.,]+)\s*\}}", r"\1"),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
    (r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![a-zA-Z]))", r"\\ln "),
    (r"\\log\s*_\s*10(?!\d)", r"\\log_{10} "),
    (r"(\d(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?:\\text\s*\{\s*)?\\?(?:\(\s*)?\\?[bp]?mod(?![a-z])\s*\}?\s*\{?\s*(\d+|[a-z])\s*\}?\)?$", r"\\mod \1"),
    (r"_\s*\{\s*\\text\{\s*(\w+)\s*\}\s*\}", r"_{\1}"),
    (r"\(\s*([0-9A-Fa-f.]+)\s*\)\s*_", r"\1_"),
    (r"(?<=[0-9A-F])\s*(?:\(\s*)?(?:in\s+)?base[\s-]+(\w+)\s*\)?$", r"_{\1}"),
    (r"_\s*\{\s*\(?(?:base\s+)?(\w+)\)?\s*\}", r"_{\1}"),
)
_DOLLARS = re.compile(r"(?<!\\)\$")
_MONEY = re.compile(r"^[-+]?\s*(?:\\?\$|[€£¥₹]|(?:USD|EUR|GBP|Rs)(?![a-zA-Z])\.?)\s*(?=[-+.\d])", re.IGNORECASE)
_TEXT_COMMAND = re.compile(rf"{TEXT}\s*(?:\{{([^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*)\}}|([a-zA-Z\d]))")
_MONEY_IN_TEXT = re.compile(r"^\\text\{\s*(\\?\$|[€£¥₹]|USD|EUR|GBP|Rs\.?)\s*\}\s*", re.IGNORECASE)
_ALL_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_BASE_WORDS = "two three four five six seven eight nine ten"
_BASES = {word: str(n) for n, word in enumerate(_BASE_WORDS.split(), start=2)}
_LEAD_WORDS = "about|approximately|approx\\.?|roughly|around|nearly|exactly|equals|therefore|thus|hence|so|is"
_LEAD = re.compile(
    rf"^(?:=|\\text\{{\s*(?:{_LEAD_WORDS})\s*,?\s*\}}|\\(?:approx|simeq|therefore|implies|Rightarrow)(?![a-zA-Z])|(?:{_LEAD_WORDS})\s*,?(?=\s+[-+\d.$\\]))\s*",
    re.IGNORECASE,
)
_SOLUTIONS_SET = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\Reals\s*)?(?:[|:]|such that)(.*(?:<|>|\\[lgn]e(?![a-z])).*)\\\}"
)
_ELEMENT = re.compile(r"^\\?[a-zA-Z]+\s*\\in(?![a-zA-Z])\s*(?=[(\[\]\\])")
_BRACKETS_OF_INTERVALS = _rules(
    (r"(^|\\cup)\s*\](?=[^\[\]()]*[\[\])])", r"\1("),
    (r"\[\s*(?=$|\\cup)", ")"),
    (r"^([(\[]|\\\{)([^,;]*);([^,]*)([)\]]|\\\})$", r"\1\2,\3\4"),
)
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


def one_spelling(text: str) -> str:
    r"""The answer without dollars, bold, leading words and a full stop; other commands for text become ``\text{}``."""
    text = " ".join(plain_characters(text).strip(" `\n").split())
    if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
        return text
    if re.fullmatch(r"\*\*.*\*\*", text, re.DOTALL):
        text = text.strip("*").strip()
    for pattern, new in _LOOKS:
        text = pattern.sub(new, text)
    if not _MONEY.match(text.strip()) or text.rstrip().endswith("$"):
        text = _DOLLARS.sub("", text)
    text = " ".join(text.split())
    text = text.removesuffix(".").strip() if not text.endswith("..") else text
    text = _TEXT_COMMAND.sub(_as_text, text).replace(r"\text{}", "")
    if "base" in text or "mod" in text:
        text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split())
    text = _MONEY_IN_TEXT.sub(r"\1 ", text)
    for pattern, new in _PLAIN:
        text = pattern.sub(new, text)
    if whole := _ALL_TEXT.fullmatch(text):
        text = whole[1]
    text = " ".join(text.split())
    text = text.removesuffix(".").strip() if not text.endswith((".m.", "..")) else text
    for _ in range(2):  # "so about 7", and no more
        text = _LEAD.sub("", text)
    text = _in_digits(_without_thousands(text))
    if match := _SOLUTIONS_SET.fullmatch(text):
        text = match[2].strip()
    text = _ELEMENT.sub("", text)
    for pattern, new in _BRACKETS_OF_INTERVALS:
        text = pattern.sub(new, text)
    return " ".join(text.split())


def _as_text(match: re.Match[str]) -> str:
    r"""``\mathrm{m\cdot s^{-2}}`` as ``\text{m\cdot s^-2}``."""
    return rf"\text{{{re.sub('[{}]', '', match[1] or match[2] or '')}}}"


def _without_thousands(text: str) -> str:
    """``1,234`` as 1234 outside of tuples, lists and sets, where a comma separates elements."""
    if "," not in text or re.search(r"[(\[]|\\\{", text):
        return text
    return (
        _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
        if not re.search(r",(?!\d{3}(?!\d))", text)
        else text
    )


def _in_digits(text: str) -> str:
    return re.sub(r"_\{(\w+)\}", lambda match: f"_{{{_BASES.get(match[1], match[1])}}}", text)


# Longer numbers go to the workers: int() takes quadratic time, and 1e999999999 fills the memory.
_MAX_DIGITS, _MAX_EXPONENT = 200, 200
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_ARGUMENT = rf"(?:\{{\s*([-+]?\s*{_DECIMAL})\s*\}}|(\d))"
_SIGNED = re.compile(r"(?:\\text\{\s*)?([-+]?)\s*")
_SIMPLE = re.compile(rf"({_DECIMAL})(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*([-+]?\d+)\s*\}}|([-+]?\d)))?")
_POWER_OF_TEN = re.compile(r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d))")
_PERIODIC = re.compile(r"(\d*\.\d*)\s*\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_FRACTION = re.compile(rf"(?:(\d+)\s*)?\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_QUOTIENT = re.compile(rf"(?:(\d+) )?({_DECIMAL}) ?/ ?({_DECIMAL})|()\( ?([-+]?{_DECIMAL}) ?/ ?({_DECIMAL}) ?\)")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(.*\d)\s*(?:\\text\{{\s*)?({'|'.join(_SCALES)})(?![a-z])\s*\}}?(.*)")
_PERCENT = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:\\?%|(?<![a-z])(?:percent|per cent|percentage|pct))\s*\}?$", re.IGNORECASE
)
_ASSIGNED = re.compile(r"(\\?[a-zA-Z]+(?:_\{?\w+\}?)?)\s*=\s*(?!.*[=<>])(.+)")
_RESIDUE = re.compile(r"(.*?)\s*\\mod (\w+)")
_IN_BRACKETS = re.compile(r" \(([a-z][a-z /-]{0,40})\)$")  # 14 (books)
_OPERATOR_AT_END = re.compile(r"[,=<>+\-*^_(]\s*$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer in one spelling.

    Attributes:
        whole: all of it.
        body: the same without unit and percent sign.
        unit: canonical name of a unit (``cm^2``, ``m s^-2``), ``""`` for counted things, or None. A modulus is a unit.
        percent: whether it ends in a percent sign.
        value: the number in ``body``, exactly, or None.
        decimals: significant digits of the value if it is a decimal that may be rounded, else 0.
        name: the letter that the value is assigned to, or ``""``.
    """

    whole: str
    body: str
    unit: str | None = None
    percent: bool = False
    value: Fraction | None = None
    decimals: int = 0
    name: str = ""


@functools.lru_cache(maxsize=4_096)  # samples of a group share the gold answer, and often their own
def read_answer(text: str) -> Answer:
    whole = body = one_spelling(text)
    percent, unit, found = False, None, None
    if residue := _RESIDUE.fullmatch(body):
        unit, body = f"mod {residue[2]}", residue[1].replace(r"\equiv", "=").strip()
        number = _ASSIGNED.sub(r"\2", body)
        if number.isdigit() and residue[2].isdigit() and int(number[:20]) >= int(residue[2][:20]):
            return Answer(whole, whole)  # 18 mod 11 is an operation
    elif money := _MONEY.match(body):
        unit = units.currency(re.sub(r"[\s+-]", "", money[0]))
        body = re.sub(r"[^+-]", "", money[0]) + body[money.end() :]
    if sign := _PERCENT.search(body):
        percent, body = True, body[: sign.start()]
    elif unit is None or not unit.startswith("mod"):
        body, found = _split_unit(body)
    if found is not None:
        if unit is not None and found not in (units.COUNTED, units.UNNAMED) and not found.endswith("^-1"):
            return Answer(whole, whole)  # $6 m are six million
        unit = f"{unit} {found}" if unit and found.endswith("^-1") else unit or found
    unit = None if unit == units.UNNAMED else unit
    name = ""
    if (assigned := _ASSIGNED.fullmatch(body)) and exact_number(assigned[2].strip()) is not None:
        name, body = assigned[1], assigned[2].strip()
    value = exact_number(body)
    return Answer(whole, body, unit, percent, value, _decimals(body) if value is not None else 0, name)


def _split_unit(body: str) -> tuple[str, str | None]:
    """The value and its unit, if it has one."""
    body = _IN_BRACKETS.sub(r" \1", body) if body[:1].isdigit() else body
    for start in units.unit_starts(body):
        value, words = body[:start].strip(), body[start:]
        if not value or _OPERATOR_AT_END.search(value) or value.count("{") != value.count("}"):
            continue  # an operand, or an element of a list
        if words[0].isalpha() and not re.search(r"[\d\\]", value):
            continue  # "square feet" is words
        assigned = _ASSIGNED.fullmatch(value)
        number = exact_number(assigned[2].strip() if assigned else value)
        several = number is None or (number.denominator == 1 and abs(number) > 1)
        is_number = number is not None or re.fullmatch(r"\d{1,2}:\d\d", value) is not None
        unit = units.read_unit(words, spaced=body[start - 1] == " ", several=several, behind_number=is_number)
        if unit is not None and not (unit == "degree" and _TRIGONOMETRIC.search(value)):
            return value, unit
    return body, None


def exact_number(body: str) -> Fraction | None:
    """The value of a decimal, fraction, mixed number, power of ten or periodic decimal; None for anything else."""
    if len(body) > _MAX_DIGITS or not body.isascii():
        return None
    if scaled := _SCALED.fullmatch(body):
        value = None if scaled[3].strip() else exact_number(scaled[1].strip())
        return None if value is None else value * _SCALES[scaled[2]]
    body = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", body) if re.fullmatch(r"[-+]?[1-9]\d{0,2}(?: \d{3})+", body) else body
    lead = _SIGNED.match(body)
    assert lead is not None
    sign, rest = (-1 if lead[1] == "-" else 1), body[lead.end() :]
    if match := _SIMPLE.fullmatch(rest):
        exponent = int(match[2] or match[3] or 0)
        return None if abs(exponent) > _MAX_EXPONENT else sign * Fraction(match[1]) * Fraction(10) ** exponent
    if match := _POWER_OF_TEN.fullmatch(rest):
        exponent = int(match[1] or match[2])
        return None if abs(exponent) > _MAX_EXPONENT else sign * Fraction(10) ** exponent
    if match := _PERIODIC.fullmatch(rest):
        period, places = match[2] or match[3], len(match[1].partition(".")[2])
        fixed = Fraction(f"0{match[1]}0")
        return sign * (fixed + Fraction(int(period), 10**places * (10 ** len(period) - 1)))
    terms = _fraction_terms(rest)
    return None if terms is None else sign * (terms[0] + terms[1] / terms[2])


def _fraction_terms(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Whole part, numerator and denominator as written: 3, 2 and 4 of ``3 2/4``."""
    match = _FRACTION.fullmatch(text) or _QUOTIENT.fullmatch(text)
    if match is None:
        return None
    whole, numerator, denominator = [
        Fraction(term.replace(" ", "")) for term in (match.groups()[0] or "0", *filter(None, match.groups()[1:]))
    ]
    if denominator == 0 or (whole and not 0 <= numerator < denominator):
        return None
    return whole, numerator, denominator


def is_reducible(text: str) -> bool:
    """Whether a final answer is a fraction or mixed number that is not in lowest terms."""
    terms = _fraction_terms(read_answer(text).body.lstrip("-+ "))
    if terms is None:
        return False
    lowest = terms[1] / terms[2]
    return abs(terms[1]) != abs(lowest.numerator) or terms[2] != lowest.denominator


def _decimals(body: str) -> int:
    match = _SIMPLE.fullmatch(body.lstrip("-+ "))
    if match is None or ("." not in match[1].rstrip(".") and "-" not in (match[2] or match[3] or "")):
        return 0
    return len(match[1].replace(".", "").lstrip("0")) or 1
