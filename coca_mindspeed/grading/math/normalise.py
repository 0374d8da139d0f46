r"""One spelling for each sign of an answer: tables of rewriting rules, applied in order; nothing is evaluated.

The result is plain LaTeX for :mod:`.parse`, without dollars, sizes, spacing commands, text commands or Unicode signs.
"""

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from coca_mindspeed.grading.math import units

_COMMANDS = """× times; · cdot; ⋅ cdot; ÷ div; π pi; ∞ infty; ≤ le; ≥ ge; ≈ approx; ¬ neg; ≠ ne; ∪ cup; ∩ cap
∅ emptyset; ∈ in; ± pm; ℓ ell; ℏ hbar; ϖ varpi; ϑ vartheta; ϱ varrho; ℝ R; ℤ Z; √ sqrt
α alpha; β beta; γ gamma; δ delta; ε epsilon; θ theta; λ lambda; μ mu; ρ rho; σ sigma; τ tau; φ phi; ω omega; Ω Omega
Δ Delta; Π Pi; Σ Sigma; Φ Phi; Γ Gamma"""
_SIGNS = {sign: rf"\{name} " for sign, name in (entry.split() for entry in _COMMANDS.replace("\n", ";").split(";"))}
_SIGNS |= {"−": "-", "–": "-", "—": "-", "。": ".", "′": "'", "″": "''", "‴": "'''"}
_SIGNS |= {"°": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F"}
_SIGN = re.compile("[" + "".join(_SIGNS) + "]")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_SCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+|[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_VULGAR_FRACTION = re.compile(r"[¼½¾⅐-⅞]")


def _script(match: re.Match[str]) -> str:
    raised = match[0].translate(_RAISED)
    return f"^{{{raised}}}" if raised != match[0] else f"_{{{match[0].translate(_LOWERED)}}}"


def _fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def plain_characters(text: str) -> str:
    """Drop invisible characters; superscripts, ``½`` and signs become LaTeX, and the rest its NFKC form."""
    if text.isascii():
        return text
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")
    text = _SCRIPT.sub(_script, re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text))
    text = _SIGN.sub(lambda m: _SIGNS[m[0]], _VULGAR_FRACTION.sub(_fraction, text))
    return unicodedata.normalize("NFC", "".join(map(_compatible, text)))


def _compatible(character: str) -> str:
    """The NFKC form, but of other superscripts and subscripts, which are no letters beside the base."""
    raised = unicodedata.decomposition(character).startswith(("<super>", "<sub>"))
    return character if raised else unicodedata.normalize("NFKC", character)


TEXT = (
    r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|boldsymbol|mbox|rm|bf|operatorname\*?)(?![a-zA-Z])"
)
_FUNCTIONS = "arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh sin cos tan cot sec csc log ln lg exp"
FUNCTION_NAMES = _FUNCTIONS.replace(" ", "|")
_NOT_IN_A_NAME = r"(?<![a-zA-Z\\])"


def _rules(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), new) for pattern, new in rules]


# Looks only: spacing, sizes, dollars, other names of one sign.
_LOOKS = _rules(
    (r"(?<=\d)(?:(?<!\\)\\[,;:! ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands as LaTeX writes them
    (r"(\\\\)|\\[,;:! ]|\\(?:q?quad|displaystyle|textstyle|limits)(?![a-zA-Z])|(?<=[^\\\s])~|&nbsp;", r"\1 "),
    (r"\s+", " "),
    (r"\\(?:left|middle|right|[bB]igg?[lmr]?)(?![a-zA-Z])\s*\.?", ""),
    (r"^\s*\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]\s*$", r"\1"),
    (r"(?<!\\)\\[(\[]\s*([-+]?[\d.,/ ]+)\\[)\]]", r" \1 "),
    (r"(?<!\\)\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]", r"(\1)"),
    (r"\\[dtc]frac|\\[ns](?:ice)?frac", r"\\frac"),
    (r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\R(?![a-zA-Z])|\\mathbb\s*\{?\s*R\s*\}?", r"\\Reals "),
    (r"\\mathbb\s*\{?\s*Z\s*\}?", r"\\Z "),
    (r"\^\s*\{?\s*\\prime(?![a-zA-Z])\s*\}?", "'"),
    (r"\{?(\^)?\s*\{?\s*\\(?:circ|degree)(?![a-zA-Z])\s*([CF])?\s*\}?\}?", r"^\\circ \2"),
)
# Spellings of plain text and of programs.
_PLAIN = _rules(
    (r"^\\text\{\s*((?i:\\?\$|[€£¥₹]|USD|EUR|GBP|Rs\.?))\s*\}", r"\1 "),
    (r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({\\-])", "^"),
    (rf"{_NOT_IN_A_NAME}sqrt\s*(\d+)", r"\\sqrt{\1}"),
    (rf"{_NOT_IN_A_NAME}sqrt(?![a-zA-Z])", r"\\sqrt "),
    (rf"{TEXT}\s*\{{\s*\\?({FUNCTION_NAMES})\s*\}}", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}({FUNCTION_NAMES})(?=\s*[({{\\\d^_]|\s+[a-zA-Z](?![a-zA-Z]))", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}(pi|infty|cdot)(?![a-zA-Z])", r"\\\1 "),
    (rf"{_NOT_IN_A_NAME}(?:infinity|inf|oo)(?![a-zA-Z])|\\inf(?![a-zA-Z])", r"\\infty "),
    (rf"{TEXT}\s*\{{\s*(e|i|\\pi)\s*\}}", r"\1 "),
    (rf"{TEXT}\s*\{{\s*([\d.,]+)\s*\}}", r"\1"),
    (r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![a-zA-Z]))", r"\\ln "),
    (r"(\d(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?:\\text\s*\{\s*)?\\?(?:\(\s*)?\\?[bp]?mod(?![a-z])\s*\}?\s*\{?\s*(\d+|[a-z])\s*\}?\)?$", r"\\mod \1"),
    (r"(?<=[0-9A-F])\s*(?:\(\s*)?(?:in\s+)?base[\s-]+(\w+)\s*\)?$", r"_{\1}"),
    (r"_\s*\{\s*\(?(?:base\s+)?(\w+)\)?\s*\}", r"_{\1}"),
)
_SIGN_OF_MONEY = r"(?:\\?\$|[€£¥₹]|(?:USD|EUR|GBP|Rs)(?![a-zA-Z])\.?)"
_MONEY = re.compile(rf"^[-+]?\s*{_SIGN_OF_MONEY}\s*(?=[-+.\d])", re.IGNORECASE)
_TEXT_COMMAND = re.compile(rf"{TEXT}\s*(?:\{{([^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*)\}}|([a-zA-Z\d]))")
_LEAD_WORDS = "about|approximately|approx\\.?|roughly|around|nearly|exactly|equals|therefore|thus|hence|so|is"
_LEAD = (
    rf"^(?i:=|\\text\{{\s*(?:{_LEAD_WORDS})\s*,?\s*\}}|\\(?:approx|simeq|therefore|implies|Rightarrow)(?![a-zA-Z])"
    rf"|(?:{_LEAD_WORDS})\s*,?(?=\s+[-+\d.$\\]))\s*"
)
# Text around the value: leading words, the name of a set's element, brackets of intervals.
_AROUND = _rules(
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"(?<!\.)(?<!\.m)\.$", ""),
    (_LEAD, ""),
    (_LEAD, ""),  # "so about 7", and no more
    (
        r"^\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\Reals\s*)?(?:[|:]|such that)(.*(?:<|>|\\[lgn]e(?![a-z])).*)\\\}$",
        r"\2",
    ),
    (r"^\\?[a-zA-Z]+\s*\\in(?![a-zA-Z])\s*(?=[(\[\]\\])", ""),
    (r"(^|\\cup)\s*\](?=[^\[\]()]*[\[\])])", r"\1("),
    (r"\[\s*(?=$|\\cup)", ")"),
    (r"^([(\[]|\\\{)([^,;]*);([^,]*)([)\]]|\\\})$", r"\1\2,\3\4"),
)
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
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
    text = _TEXT_COMMAND.sub(_as_text, text).replace(r"\text{}", "")
    if "base" in text or "mod" in text:
        text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split())
    text = _applied(_AROUND, _applied(_PLAIN, text))
    return text if _LIST.search(text) else _GROUPED.sub(lambda match: match[0].replace(",", ""), text)


def _applied(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, new in rules:
        text = pattern.sub(new, text).strip()
    return " ".join(text.split())


def _as_text(match: re.Match[str]) -> str:
    r"""``\mathrm{m\cdot s^{-2}}`` as ``\text{m\cdot s^-2}``."""
    return rf"\text{{{re.sub('[{}]', '', match[1] or match[2] or '')}}}"


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
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(.*\d)\s*(?:\\text\{{\s*)?({'|'.join(_SCALES)})(?![a-z])\s*\}}?(.*)")
_PERCENT = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:\\?%|(?<![a-z])(?:percent|per cent|percentage|pct))\s*\}?$", re.IGNORECASE
)
_ASSIGNED = re.compile(r"(\\?[a-zA-Z]+(?:_\{?\w+\}?)?)\s*=\s*(?!.*[=<>])(.+)")
_RESIDUE = re.compile(r"(.*?)\s*\\mod (\w+)")
_IN_BASE = re.compile(r"([1-9]\d*) ?_ ?\{?(\d{1,2})\}?")
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
    elif (based := _IN_BASE.fullmatch(body)) and max(map(int, based[1])) < int(based[2]):
        unit, body = f"base {based[2]}", based[1]
    elif money := _MONEY.match(body):
        unit = units.currency(re.sub(r"[\s+-]", "", money[0]))
        body = re.sub(r"[^+-]", "", money[0]) + body[money.end() :]
    if sign := _PERCENT.search(body):
        percent, body = True, body[: sign.start()]
    elif unit is None or not unit.startswith(("mod", "base")):
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
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(?: \d{3})+", body):
        body = body.replace(" ", "")
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


def _decimals(body: str) -> int:
    match = _SIMPLE.fullmatch(body.lstrip("-+ "))
    if match is None or ("." not in match[1].rstrip(".") and "-" not in (match[2] or "")):
        return 0
    return len(match[1].replace(".", "").lstrip("0")) or 1
