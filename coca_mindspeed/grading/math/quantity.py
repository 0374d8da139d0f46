"""The exact path of math grading: numbers and their units, without evaluating anything.

Numbers are compared as exact rationals in the calling process, in linear time; all else is left to :mod:`.symbolic`.
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from coca_mindspeed.grading.math.final_answer import plain_characters, without_boxes
from coca_mindspeed.grading.math.spelling import TEXT, standard_spelling
from coca_mindspeed.grading.math.units import UNNAMED, currency_unit, read_unit

# Longer numbers go to the workers: int() takes quadratic time, and 1e999999999 fills the memory.
_MAX_DIGITS = 200
_MAX_EXPONENT = 200

# Units are short; a search from every letter of a long text would be quadratic.
_MAX_UNIT_CHARACTERS = 60

# A decimal matches a value without a finite decimal form (1/3, the root of 2) within one part in a million.
DECIMAL_TOLERANCE = Fraction(1, 10**6)

# Matches both backslashes, so that the second one and the blank after it are not read as a space.
_ROW_BREAK = r"(\\\\)(?: ?\[[\d. -]{0,9}(?:pt|em|ex|mm|cm)\])?"
_SPACING = re.compile(
    _ROW_BREAK + r"|\\[,;:! ]|\\(?:quad|qquad|displaystyle|textstyle|limits)(?![a-zA-Z])|(?<=[^\\\s])~|&nbsp;"
)
_SIZING = re.compile(r"\\(?:left|middle|right|[bB]igg?[lmr]?)(?![a-zA-Z])\s*\.?")
# Contains no other delimiter: two formulas side by side do not match as one.
_FORMULA = re.compile(r"(?<!\\)\\[(\[]((?:\\[^()\[\]]|[^\\])*)\\[)\]]")
_DOLLARS = re.compile(r"(?<!\\)\$")
_ALL_TEXT = re.compile(rf"^{TEXT}$")
_EMPTY_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*\}")
# A unit may begin at a letter or sign outside of braces that is not inside a longer name.
_UNIT_START = re.compile(
    r"""(?:\{\s*\}\s*)?\^\s*\{?\s*\\circ(?![a-zA-Z])
    | \\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|rm|operatorname|mu|Omega|degree|[dt]?frac|\$)
      (?![a-zA-Z])
    | (?<![a-zA-Z\\{μ])[a-zA-ZμΩÅ°€£¥₹¢] | [\u4e00-\u9fff]""",
    re.VERBOSE,
)
_FORMULA_SIGN = re.compile(r"[\d\\]")
_ENDS_IN_OPERATOR = re.compile(r"[,=<>+\-*^_(]\s*$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_CLOCK = re.compile(r"\d{1,2}(?::|\{:\})\d\d")
_RESIDUE = re.compile(r"\s*\\pmod\{([^{}]*)\}$")
_PERCENT_SIGN = r"(?:\\?%|\b(?:percent|per cent|pct|percentage))"
_PERCENT = re.compile(
    rf"\s*(?:{_PERCENT_SIGN}|\\(?:text|textrm|mathrm|mbox)\s*\{{\s*{_PERCENT_SIGN}\s*\}})$", re.IGNORECASE
)
_CURRENCY = re.compile(r"^([-+]?)\s*(\\\$|[$€£¥₹]|(?:USD|EUR|GBP|Rs)(?![a-zA-Z])\.?)\s*", re.IGNORECASE)
_CURRENCY_IN_TEXT = re.compile(r"^\\text\s*\{\s*(\\?\$|[€£¥₹]|USD|EUR|GBP|Rs\.?)\s*\}\s*", re.IGNORECASE)
_LEAD_WORDS = r"(?:about|approximately|approx\.?|roughly|around|nearly|exactly|equals|therefore|thus|hence|so|is)"
_LEAD = re.compile(
    rf"^(?:=|~(?=\s*[-+\d$])|\\(?:approx|simeq|therefore|implies|Rightarrow)(?![a-zA-Z])|\\text\s*\{{\s*{_LEAD_WORDS}\s*,?\s*\}}"
    rf"|{_LEAD_WORDS}(?:\s*,)?\s+(?=[-+\d.$\\]))\s*(?=\S)",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"^[-+]?[1-9]\d{0,2}(?:(?:(?:,|\{,\})\d{3})+|(?: \d{3})+)(?:\.\d*)?$")
_THOUSANDS_SPACED = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))")
_ASSIGNED = re.compile(r"^\\?[a-zA-Z](?:_\{?\w\}?)?\s*=\s*(?!.*[=<>])(.+)$", re.DOTALL)

_DECIMAL = r"\d+(?:\.\d*)?|\.\d+"
_POWER = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d))"
_PLAIN = re.compile(rf"^([-+]?)\s*({_DECIMAL})(?:[eE]([-+]?\d{{1,4}}))?$")
_SCIENTIFIC = re.compile(rf"^([-+]?)\s*(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?{_POWER}$")
_REPEATING = re.compile(r"^([-+]?)\s*(\d*)\.(\d*)\s*\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))$")
_FRAC_PARTS = (
    r"\\[dtc]?frac\s*(?:\{\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*\}|(\d))\s*(?:\{\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*\}|(\d))"
)
_FRACTION = re.compile(rf"^([-+]?)\s*(?:(\d+)\s*)?{_FRAC_PARTS}$")
_QUOTIENT = r"([-+]?\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)"
# "3 1/2" is a mixed number; 3 + 1/2 is a sum.
_SLASHED = re.compile(rf"^([-+]?)\s*(?:(?:(\d+)\s+)?{_QUOTIENT}|\(\s*{_QUOTIENT}\s*\))$")

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CHINESE_SCALES = {"十": 10, "百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8}
_SCALED = re.compile(rf"^(.*\d)\s*(?:(?:\\text\s*\{{)?\s*({'|'.join(_SCALES)})\s*\}}?|([十百千万亿]{{1,2}}))$")


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed final answer.

    Attributes:
        body: LaTeX without spacing commands, dollars, unit and percent sign.
        whole: the same with unit and percent sign.
        unit: canonical name of a unit (``cm^2``, ``m s^-2``), ``""`` for counted things, or None. A modulus is a unit.
        percent: whether it ends in a percent sign.
        value: the exact number in ``body``, or None.
        decimal: whether ``value`` was written with a point or a negative exponent.
    """

    body: str
    whole: str
    unit: str | None
    percent: bool
    value: Fraction | None
    decimal: bool


def read_answer(text: str) -> Answer:
    whole = body = clean_latex(text)
    percent = False
    unit: str | None = None
    if modulus := _RESIDUE.search(body):
        return _read_residue(body[: modulus.start()], whole, f"mod {modulus[1]}")
    if currency := _CURRENCY.match(body):
        unit = currency_unit(currency[2])
        body = currency[1] + body[currency.end() :]
    if sign := _PERCENT.search(body):
        percent, body = True, body[: sign.start()]
    else:
        body, found = _split_unit(body)
        if found is not None:
            unit = f"{unit} {found}" if unit and found.endswith("^-1") else found
    if unit == UNNAMED:
        unit = None
    if (assigned := _ASSIGNED.match(body)) and _exact(assigned[1].strip())[0] is not None:
        # The symbolic path needs the variable.
        return Answer(body, whole, unit, percent, None, False)
    value, decimal = _exact(body)
    return Answer(body, whole, unit, percent, value, decimal)


def _read_residue(body: str, whole: str, unit: str) -> Answer:
    body = body.replace("\\equiv", "=").strip()
    value, decimal = (None, False) if _ASSIGNED.match(body) else _exact(body)
    return Answer(body, whole, unit, False, value, decimal)


def assigned_number(answer: Answer) -> Answer | None:
    """``5`` of ``x = 5``, or None if the answer does not assign a number to one variable."""
    match = _ASSIGNED.match(answer.body)
    if match is None:
        return None
    value, decimal = _exact(match[1].strip())
    return None if value is None else replace(answer, body=match[1].strip(), value=value, decimal=decimal)


def clean_latex(text: str) -> str:
    r"""Remove formatting: spacing, sizing, dollars, a full stop, a box or ``\text{}`` around the whole."""
    text = without_boxes(plain_characters(text))
    text = _THOUSANDS_SPACED.sub("", text.strip())
    text = _SPACING.sub(lambda match: match[1] or " ", text)
    text = _SIZING.sub("", text)
    text = _CURRENCY_IN_TEXT.sub(lambda match: match[1] + " ", text)
    if not _CURRENCY.match(text) or text.endswith("$"):
        text = _DOLLARS.sub("", text)
    text = text.strip().strip("*`").strip()
    if whole := _FORMULA.fullmatch(text):
        text = whole[1]
    text = _FORMULA.sub(_apart, text).strip()
    text = text.removesuffix(".").strip() if not text.endswith("..") else text
    text = _EMPTY_TEXT.sub("", text)
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("\\varnothing", "\\emptyset")
    for _ in range(2):  # "\therefore \approx 7", and no more
        text = _LEAD.sub("", text)
    if whole := _ALL_TEXT.match(text):
        text = whole[1].strip()
    return standard_spelling(" ".join(text.split()))


def _apart(formula: re.Match[str]) -> str:
    """A formula within a text: numbers stay, anything else gets brackets."""
    return f" {formula[1]} " if re.fullmatch(r"\s*[-+]?[\d.,/ ]+\s*", formula[1]) else f"({formula[1]})"


def _split_unit(body: str) -> tuple[str, str | None]:
    """The value and its unit; two units side by side, as in ``5 m dollars``, are none."""
    value, unit, is_number = _split_words(body)
    return (body, None) if unit is not None and not is_number and _split_words(value)[1] is not None else (value, unit)


def _split_words(body: str) -> tuple[str, str | None, bool]:
    """The value, its unit, and whether the value is a number."""
    for match in _UNIT_START.finditer(body, max(0, len(body) - _MAX_UNIT_CHARACTERS)):
        value, words = body[: match.start()].strip(), body[match.start() :]
        if not value or _ENDS_IN_OPERATOR.search(value) or value.count("{") != value.count("}"):
            continue  # an operand, or an element of a list
        if match[0].isalpha() and not _FORMULA_SIGN.search(value):
            continue  # "square feet" is words
        assigned = _ASSIGNED.match(value)
        number, _ = _exact(assigned[1].strip() if assigned else value)
        unit = read_unit(
            words,
            spaced=body[match.start() - 1] == " ",
            several=number is None or (number.denominator == 1 and abs(number) > 1),
            behind_number=number is not None or _CLOCK.fullmatch(value) is not None,
        )
        if unit is not None and not (unit == "degree" and _FUNCTION.search(value)):
            return value, unit, number is not None
    return body, None, False


def _exact(body: str) -> tuple[Fraction | None, bool]:
    if len(body) > _MAX_DIGITS:
        return None, False
    if (scaled := _SCALED.match(body)) and (value := _exact(scaled[1].strip())[0]) is not None:
        scale = _SCALES.get(scaled[2]) or math.prod(_CHINESE_SCALES[sign] for sign in scaled[3])
        return value * scale, False
    if not body.isascii():
        return None, False
    if _THOUSANDS.match(body):
        body = body.replace("{,}", "").replace(",", "").replace(" ", "")
    if match := _PLAIN.match(body):
        exponent = int(match[3] or 0)
        if abs(exponent) > _MAX_EXPONENT:
            return None, False
        value = Fraction(match[2]) * Fraction(10) ** exponent
        return _signed(match[1], value), "." in match[2].rstrip(".") or exponent < 0
    if match := _SCIENTIFIC.match(body):
        exponent = int(match[3] or match[4])
        if abs(exponent) > _MAX_EXPONENT:
            return None, False
        return _signed(match[1], Fraction(match[2] or 1) * Fraction(10) ** exponent), exponent < 0
    if match := _REPEATING.match(body):
        fixed, period = match[3], match[4] or match[5]
        repeating = Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
        return _signed(match[1], Fraction(f"{match[2] or 0}.{fixed or 0}") + repeating), False
    if fraction := _read_fraction(body):
        sign, whole, numerator, denominator = fraction
        return _signed(sign, whole + numerator / denominator), False
    return None, False


def is_reducible(text: str) -> bool:
    """Whether a final answer is a fraction or mixed number that is not in lowest terms."""
    answer = read_answer(text)
    fraction = _read_fraction((assigned_number(answer) or answer).body)
    if fraction is None:
        return False
    _, _, numerator, denominator = fraction
    lowest = numerator / denominator
    return abs(numerator) != abs(lowest.numerator) or denominator != lowest.denominator


def _read_fraction(body: str) -> tuple[str, Fraction, Fraction, Fraction] | None:
    """Sign, whole part, numerator and denominator as written: ``-``, 3, 2 and 4 of ``-3 2/4``."""
    match = _FRACTION.match(body) or _SLASHED.match(body)
    if match is None:
        return None
    sign, whole, *terms = match.groups()
    numerator, denominator = (Fraction(term) for term in terms if term is not None)
    if denominator == 0 or (whole and not 0 <= numerator < denominator):
        return None
    return sign, Fraction(whole or 0), numerator, denominator


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def same_number(gold: Answer, answer: Answer) -> bool:
    """Compare two numbers by the rules of docs/grading.md for decimals and percent signs."""
    if gold.value is None or answer.value is None:
        raise ValueError("same_number takes answers that are numbers")
    if _close(gold.value, answer.value, gold.decimal or answer.decimal):
        return True
    if gold.percent == answer.percent:
        return False
    # 50% is 0.5, whichever side carries the sign.
    percent, plain = (gold, answer) if gold.percent else (answer, gold)
    assert percent.value is not None
    assert plain.value is not None
    return _close(percent.value / 100, plain.value, percent.decimal or plain.decimal)


def _close(a: Fraction, b: Fraction, decimal: bool) -> bool:
    if a == b:
        return True
    # Only a value without a finite decimal form may be rounded.
    if not decimal or (_terminates(a) and _terminates(b)):
        return False
    return abs(a - b) <= DECIMAL_TOLERANCE * max(abs(a), abs(b))


def _terminates(value: Fraction) -> bool:
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1
