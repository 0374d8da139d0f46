"""One spelling for each sign of an answer: tables of rewriting rules, applied in order, give plain LaTeX."""

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from coca_mindspeed.grading.math import units
from coca_mindspeed.utils.characters import compatible_character, without_invisible

_COMMANDS = """× times; · cdot; ⋅ cdot; ÷ div; π pi; ∞ infty; ≤ le; ≥ ge; ≈ approx; ≠ ne; ¬ neg; ∪ cup; ∩ cap; ± pm
∅ emptyset; ∈ in; ℝ R; √ sqrt; α alpha; β beta; γ gamma; θ theta; λ lambda; μ mu; σ sigma; φ phi; ω omega; Ω Omega
Δ Delta; ℓ ell; ℏ hbar; ϖ varpi; ϑ vartheta; ϱ varrho; ∨ lor; ∧ land"""
_SIGNS = {sign: rf"\{name} " for sign, name in (entry.split() for entry in _COMMANDS.replace("\n", ";").split(";"))}
_SIGNS |= {**dict.fromkeys("−–—‐‑‒―", "-"), "。": ".", "′": "'", "″": "''", "‴": "'''"}
_SIGNS |= {"°": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F"}
_SIGN = re.compile("[" + "".join(_SIGNS) + "]")
# Raised and lowered digits; ³√ is a cube root. µg is a unit, but μg may be a product.
_SHIFTED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_SHIFTED_RUN = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+(?![⁰¹²³⁴-⁹√])|[₀-₉]+")
_VULGAR_FRACTION = re.compile("[¼½¾⅐-⅟↉]")
_MICRO = re.compile(r"(?<=\d)\s*(?:µ|μ(?!g))([msgLFCAVW])(?![a-zA-Z])")


def _shifted(run: re.Match[str]) -> str:
    digits = run[0].translate(_SHIFTED)
    return ("_" if run[0][0] in "₀₁₂₃₄₅₆₇₈₉" else "^") + (digits if len(digits) == 1 else f"{{{digits}}}")


def plain_characters(text: str) -> str:
    """Drop invisible characters; signs become LaTeX, fractions text, and the rest its compatible form."""
    if text.isascii():
        return text
    text = _SHIFTED_RUN.sub(_shifted, without_invisible(text))
    text = _MICRO.sub(r" \\text{\\mu \1}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = _VULGAR_FRACTION.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], text)
    return unicodedata.normalize("NFC", "".join(map(compatible_character, text)).replace("\u2044", "/"))


TEXT = (
    r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|boldsymbol|mbox|rm|bf|operatorname\*?)(?![a-zA-Z])"
)
FUNCTION_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|lg|exp"
_NOT_IN_A_NAME = r"(?<![a-zA-Z\\])"


def _rules(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), new) for pattern, new in rules]


# Looks only: spacing, sizes, dollars, other names of one sign.
_LOOKS = _rules(
    (r"(?<=\d)(?:(?<!\\)\\[,;:! ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands as LaTeX writes them
    (r"(\\\\)|\\[,;:! ]|\\(?:q?quad|displaystyle|textstyle|limits)(?![a-zA-Z])|(?<=[^\\\s])~|&nbsp;", r"\1 "),
    (r"(?<=\d )~(?=\\)|(?<!\S)~(?=\s?[-.\d])", " "),
    (r"\\(?:left|middle|right|[bB]igg?[lmr]?)(?![a-zA-Z])\s*\.?", ""),
    (r"^\s*\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]\s*$", r"\1"),
    (r"\\[dtc]frac|\\[ns](?:ice)?frac", r"\\frac"),
    (r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\vee(?![a-zA-Z])", r"\\lor "),
    (r"\\wedge(?![a-zA-Z])", r"\\land "),
    (r"\{\s*:\s*\}|\\colon(?![a-zA-Z])", ":"),
    (r"\\R(?![a-zA-Z])|\\mathbb\s*\{?\s*R\s*\}?", r"\\Reals "),
    (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])|(?<=\\Reals )\s*-(?=\s*\\\{)", r"\\setminus "),
    (r"\^\s*\{?\s*\\prime(?![a-zA-Z])\s*\}?", "'"),
    (r"\{?(\^)?\s*\{?\s*\\(?:circ|degree)(?![a-zA-Z])\s*([CF])?\s*\}?\}?", r"^\\circ \2"),
)
# Spellings of plain text and of programs.
_PLAIN = _rules(
    (rf"{_NOT_IN_A_NAME}sqrt(?![a-zA-Z])", r"\\sqrt "),
    (rf"{TEXT}\s*\{{\s*\\?({FUNCTION_NAMES})\s*\}}", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}({FUNCTION_NAMES})(?=\s*[({{\\\d^_]|\s+[a-zA-Z](?![a-zA-Z]))", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}(pi|infty|cdot)(?![a-zA-Z])", r"\\\1 "),
    (rf"{TEXT}\s*\{{\s*(e|i|\\pi|[\d.,]+|-{{1,3}})\s*\}}", r"\1"),
    (r"(?<=\d)\s*(?:\{\s*(-{1,3})\s*\}|\\text(?:en|em)dash(?![a-zA-Z])(?:\{\})?)\s*(?=\d)", "-"),
    (r"(\d(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?:\{ ?|^)([^{}=,;\\]+?) ?\\over(?![a-z]) ?([^{}=,;\\]+?)(?: ?\}|$)", r"\\frac{\1}{\2}"),
    (r"\\[bp]?mod(?![a-z])\s*\{?\s*(\w+)\s*\}?", r"\\mod \1"),
    (r"_\s*\{\s*(\w+)\s*\}", r"_{\1}"),
)
_MONEY = re.compile(r"^[-+]?\s*(\\?\$|[€£]|Rs\.?)\s*(?=[-+.\d])")
_TEXT_COMMAND = re.compile(rf"({TEXT})\s*(?:\{{([^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*)\}}|([a-zA-Z\d]))")
_BOLD = re.compile(r"\\(?:textbf|mathbf|boldsymbol|bf)")
_ORDERED_PRODUCT = re.compile(r"\\times(?![a-zA-Z])|\^\s*\{?\s*(?:-\s*1|T|\\(?:mathrm|text)\s*\{?T\}?)(?![\w.])")
_POINT = re.compile(r"[A-Z](?:_\d|_\{\w+\}|'+)*")
_ANGLE = re.compile(rf"\\angle\s*\{{?\s*((?:{_POINT.pattern}\s*){{3}})\}}?(?![A-Z])")
_UP_TO_TWELVE = "zero one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_NUMBERS = [*_UP_TO_TWELVE.split(), *_TEENS.split(), "twenty"]
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE_WORD = rf"({'|'.join(_SCALES)})(?![a-zA-Z]|\s*\}}?\s*\d)"
_SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\{{\s*{_SCALE_WORD}\s*\}}|(\\text\{{)?\s*{_SCALE_WORD})")
_STATEMENT = r"(?:(?:So|Thus|Hence|Therefore),? )?(?i:(?:the )?(?:final )?answer) ?(?:is ?:?|:)"
# Text around the value: leading words, the name of a set's element, brackets of intervals.
_AROUND = _rules(
    (rf"^\\text\{{ ?{_STATEMENT} ?\}}|^(\\text\{{)? ?{_STATEMENT}", r"\1"),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"^(?:=|\\(?:approx|therefore|implies|Rightarrow)(?![a-zA-Z])|(?i:\\text\{\s*about\s*\}))\s*", ""),
    (r"^\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\Reals\s*)?(?:[|:]|such that)(.*(?:<|>|\\[lgn]e(?![a-z])).*)\\\}$", r"\2"),
    (r"(^|\\cup)\s*\](?=[^\[\]()]*[\[\])])", r"\1("),
    (r"\[\s*(?=$|\\cup)", ")"),
)
_GROUPED = re.compile(
    r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|(?<![\w.^])(?<!\d )[1-9]\d{0,2}(?: \d{3})+(?! ?[\d/]|,)"
)
_LIST = re.compile(r"[(\[]|\\\{|,(?!\d{3}(?!\d))")  # where a comma separates elements


def one_spelling(text: str) -> str:
    r"""The answer without dollars, bold, leading words and a full stop; other commands for text become ``\text{}``."""
    text = " ".join(plain_characters(text).strip(" `\n").split())
    if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
        return text
    text = _applied(_LOOKS, re.sub(r"^\*\*(.*)\*\*$", r"\1", text))
    if not _MONEY.match(text) or text.endswith("$"):
        text = re.sub(r"(?<!\\)\$", "", text)
    text = re.sub(r"(?<!\.)\.$", "", text.strip())
    has_products = _ORDERED_PRODUCT.search(text)
    text = _TEXT_COMMAND.sub(lambda match: _one_text(match, bool(has_products)), text).replace(r"\text{}", "")
    text = _ANGLE.sub(_points_in_order, text)
    text = _SCALE.sub(lambda m: rf"\times 10^{{{_SCALES[m[1] or m[3]]}}}{m[2] or ''}", text)
    text = _applied(_AROUND, _applied(_PLAIN, text))
    return text if _LIST.search(text) else _GROUPED.sub(lambda match: re.sub("[, ]", "", match[0]), text)


def _one_text(match: re.Match[str], has_products: bool) -> str:
    r"""``\text{}`` for other commands; a letter keeps what it is: the name of a function, or a vector in a product."""
    command, inside = match[1], re.sub("[{}]", "", match[2] or match[3] or "")
    if len(inside.strip()) == 1 and inside.strip().isalpha():
        if has_products and _BOLD.match(command):
            return rf"\mathbf{{{inside.strip()}}}"
        if not _BOLD.match(command) and re.match(r"\s*[(\[]", match.string[match.end() :]):
            return rf"\operatorname{{{inside.strip()}}}"
    return rf"\text{{{inside}}}"


def _points_in_order(match: re.Match[str]) -> str:
    """An angle is the same from its other side."""
    points = _POINT.findall(match[1])
    return rf"\angle{{{''.join(min(points, points[::-1]))}}}"


def _applied(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, new in rules:
        text = pattern.sub(new, text).strip()
    return " ".join(text.split())


# Longer numbers go to the workers: int() takes quadratic time, and 1e999999999 fills the memory.
_MAX_DIGITS, _MAX_EXPONENT = 200, 200
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_ARGUMENT = rf"(?:\{{\s*([-+]?\s*{_DECIMAL})\s*\}}|(\d))"
_SIMPLE = re.compile(rf"({_DECIMAL})(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([-+]?\d+)\s*\}}?)?")
_PERIODIC = re.compile(r"(\d*\.\d*)\s*\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_FRACTION = re.compile(
    rf"(?:(\d+)\s*)?\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}|(?:(\d+) )?({_DECIMAL}) ?/ ?({_DECIMAL})"
    rf"|\( ?([-+]?{_DECIMAL}) ?/ ?({_DECIMAL}) ?\)"
)
_PERCENT = re.compile(r"\s*(?:\\text\s*\{\s*)?(?:\\?%|(?<![a-z])(?:percent|per cent))\s*\}?$", re.IGNORECASE)
#: What may be assigned to, besides letters and text: an angle, a segment, its length.
FIGURE = r"m? ?\\angle ?\{?[A-Z\d]+\}?|\\overline ?\{[A-Z]+\}|\|[A-Z]{2}\|"
_NAME = rf"(?:{FIGURE}|\\?[a-zA-Z]+(?:_\{{?\w+\}}?)?)"
_ASSIGNED = re.compile(rf"({_NAME}(?:\s*\+\s*{_NAME})*)\s*=\s*(?!.*[=<>])(.+)")
_IN_BASE = re.compile(r"(\()?([1-9]\d*)(?(1)\)) ?_ ?(?:\{?(\d{1,2})\}?|\{?\\text\{ ?([a-z]+) ?\}\}?)")
_IN_BRACKETS = re.compile(r"(?: |\\text\{ ?)\(([a-z][a-z /-]{0,40})\)(?: ?\})?$")  # 14 (books)
_OPERATOR_AT_END = re.compile(r"[,=<>+\-*^_(]\s*$")


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer in one spelling."""

    whole: str
    body: str  # without unit and percent sign
    unit: str | None = None  # canonical name (``cm^2``), ``""`` for counted things, ``base 2``, or None
    percent: bool = False
    value: Fraction | None = None  # the number in body, exactly
    decimals: int = 0  # significant digits of a decimal, which may be rounded
    name: str = ""  # the name, or sum of names, that the value is assigned to


@functools.lru_cache(maxsize=4_096)  # samples of a group share the gold answer, and often their own
def read_answer(text: str) -> Answer:
    whole = body = one_spelling(text)
    percent, unit, split = False, None, None
    based = _IN_BASE.fullmatch(body)
    base = int(based[3] or (_NUMBERS.index(based[4]) if based[4] in _NUMBERS else 0)) if based else 0
    if based and max(map(int, based[2])) < base:
        unit, body = f"base {base}", based[2]
    elif money := _MONEY.match(body):
        unit = units.UNITS[money[1].strip("\\.")]
        body = re.sub(r"[^+-]", "", money[0]) + body[money.end() :]
    if sign := _PERCENT.search(body):
        percent, body = True, body[: sign.start()]
    elif not (unit or "").startswith("base"):
        body, split = _split_unit(body)
    if unit is None:
        unit = None if split == units.UNNAMED else split
    elif split and split != units.UNNAMED:
        if not split.endswith("^-1"):
            return Answer(whole, whole)  # $6 m are six million
        unit = f"{unit} {split}"
    name = ""
    if (assigned := _ASSIGNED.fullmatch(body)) and exact_number(assigned[2].strip()) is not None:
        name, body = re.sub(r"^m(?= ?\\angle)|(?<![a-zA-Z]) | (?![a-zA-Z])", "", assigned[1]), assigned[2].strip()
    simple = _SIMPLE.fullmatch(body.lstrip("-+ "))
    rounded = simple and ("." in simple[1].rstrip(".") or "-" in (simple[2] or ""))
    decimals = len(simple[1].replace(".", "").lstrip("0")) or 1 if simple and rounded else 0
    return Answer(whole, body, unit, percent, exact_number(body), decimals, name)


def _split_unit(body: str) -> tuple[str, str | None]:
    """The value and its unit, if it has one."""
    if body[:1].isdecimal() and (note := _IN_BRACKETS.search(body)):
        value = body[: note.start()].strip()
        if note[1] in _NUMBERS:  # 5 (five)
            return value if exact_number(value) == _NUMBERS.index(note[1]) else body, None
        body = f"{value} {note[1]}"
    for start in units.unit_starts(body):
        value, words = body[:start].strip(), body[start:]
        if not value or _OPERATOR_AT_END.search(value) or value.count("{") != value.count("}"):
            continue  # an operand, or an element of a list
        if words[0].isalpha() and not re.search(r"[\d\\]", value):
            continue  # "square feet" is words
        assigned = _ASSIGNED.fullmatch(value)
        number = exact_number(re.sub(r"^(\d{1,2}):(\d\d)$", r"\1.\2", assigned[2].strip() if assigned else value))
        unit = units.read_unit(words, number, spaced=body[start - 1] == " ")
        if unit is not None and (number is not None or unit != "degree"):  # the sine of 30 degrees has no unit
            return value, unit
    return body, None


def exact_number(body: str) -> Fraction | None:
    """The value of a decimal, fraction, mixed number, power of ten or periodic decimal; None for anything else."""
    if len(body) > _MAX_DIGITS or not body.isascii():
        return None
    sign, rest = (-1 if body[:1] == "-" else 1), re.sub(r"^[-+]? *", "", body)
    if match := _SIMPLE.fullmatch(rest):
        exponent = int(match[2] or 0)
        return None if abs(exponent) > _MAX_EXPONENT else sign * Fraction(match[1]) * Fraction(10) ** exponent
    if match := _PERIODIC.fullmatch(rest):
        places = len(match[1].partition(".")[2])
        period = Fraction(int(match[2]), 10**places * (10 ** len(match[2]) - 1))
        return sign * (Fraction(f"0{match[1]}0") + period)
    terms = fraction_terms(rest)
    return None if terms is None else sign * (terms[0] + terms[1] / terms[2])


def fraction_terms(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """Whole part, numerator and denominator as written: 3, 2 and 4 of ``3 2/4``."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    terms = [Fraction(term.replace(" ", "")) for term in match.groups() if term]
    whole, numerator, denominator = terms if len(terms) == 3 else (Fraction(0), *terms)
    return None if denominator == 0 or (whole and not 0 <= numerator < denominator) else (whole, numerator, denominator)
