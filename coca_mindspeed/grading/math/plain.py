r"""Compare two answers without algebra: numbers, spellings, choices and words.

Everything is exact and linear in the text, so that it can run in the caller's process.
"""

import re
import string
from fractions import Fraction

from coca_mindspeed.data.records import applies_function
from coca_mindspeed.grading.math.normalise import Answer
from coca_mindspeed.grading.math.units import UNNAMED
from coca_mindspeed.grading.verdict import Outcome, Verdict

ROUNDED = Fraction(1, 10**6)  # relative error of a gold answer that is a rounded decimal
DOUBLE_DIGITS = 15  # significant digits of a program's output, which is as good as the exact value

_LETTER = r"[^\W\d_]"
_WORD = rf"(?:{_LETTER}+|\d+(?:st|nd|rd|th)?)"
_WORDS = re.compile(rf"{_LETTER}{{2,}}\.?|{_WORD}(?:[ ,.'’-]+{_WORD})+\.?")
_LONG_WORD = re.compile(rf"(?<!{_LETTER}){_LETTER}{{3,}}|^{_LETTER}{{2}}\.?$")
_MATH_WORDS = re.compile(r"\b(?:pi|infinity|and|or)\b", re.IGNORECASE)
# Other letters in a row may name points, genes or factors, where the case counts.
_SHORT = "no yes on odd red day not one two six ten all any top low am pm mon tue wed thu fri sat sun"
_SHORT_WORDS = frozenset(_SHORT.split())
_NO_WORD = re.compile("[^aeiouAEIOU]+")
CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*(.+)")
# The option's text must not name another choice.
_OTHER_CHOICE = re.compile(
    r"(?<![A-Za-z\\])[B-H](?![A-Za-z])|(?<![A-Za-z\\])A(?! [a-z])(?![A-Za-z])|[,;|]\s*[a-df-h]\s*$|^[,;|/&]"
    r"|^[A-Za-z](?:[ ,;/]+[A-Za-z])+$|^(?:or|and|maybe|perhaps|not [A-H])\b"
    r"|\b(?:is|isn't) (?:wrong|incorrect|not)\b|^wrong$"
)


def verdict_without_algebra(gold: Answer, answer: Answer) -> Verdict | None:
    """The verdict on two answers without algebra, or None if it takes some."""
    if not gold.body:
        return Verdict(Outcome.UNGRADABLE, "the gold answer is empty")
    wanted_unit, given_unit = ("%" if side.percent else side.unit for side in (gold, answer))
    if not {wanted_unit, given_unit} & {None, UNNAMED} and wanted_unit != given_unit:
        return Verdict(Outcome.WRONG, f"the unit is {given_unit}, not {wanted_unit}")
    if gold.value is not None and answer.value is not None and "+" not in gold.name:  # x+y=5 is an equation
        equal: bool | None = same_number(gold, answer) and (gold.name == answer.name or "" in (gold.name, answer.name))
    elif _same_spelling(gold, answer):
        equal = True
    elif wanted := CHOICE.fullmatch(plain_text(gold.body)):
        equal = _chosen(plain_text(answer.body), wanted[1])
    else:
        equal = _same_words(plain_text(gold.body), plain_text(answer.body), gold.value is not None)
    return None if equal is None and answer.body else Verdict(Outcome.RIGHT if equal else Outcome.WRONG)


def same_number(gold: Answer, answer: Answer) -> bool:
    """Compare two numbers by the rules of docs/grading.md for decimals and percent signs."""
    a, b = gold.value, answer.value
    assert a is not None and b is not None  # noqa: PT018
    if gold.percent == answer.percent:
        return _close(gold, answer, a, b)
    plain, value = (answer, b) if gold.percent else (gold, a)
    # The question may ask for percent: 50 or 62.5, but not .125 and not 1/8.
    asked = abs(value) >= 1 and re.fullmatch(r"[-+]?\s*[\d.]+", plain.body) is not None
    as_percent = (a / 100, b) if gold.percent else (a, b / 100)
    return (asked and _close(gold, answer, a, b)) or _close(gold, answer, *as_percent)


def _close(gold: Answer, answer: Answer, a: Fraction, b: Fraction) -> bool:
    """Whether two values are the same; only one without a finite decimal form may be rounded."""
    if a == b:
        return True
    if gold.decimals and not answer.decimals and not terminates(b):
        return abs(a - b) <= ROUNDED * abs(a)
    return answer.decimals >= DOUBLE_DIGITS and not terminates(a) and abs(a - b) <= abs(a) / 10 ** (DOUBLE_DIGITS - 1)


def terminates(value: Fraction) -> bool:
    return bool(10 ** value.denominator.bit_length() % value.denominator == 0)


def plain_text(body: str) -> str:
    r"""The text without ``\text{}``, with single blanks."""
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r"\1", body).split())


def is_words(text: str) -> bool:
    """Whether an answer consists of words and whole numbers, such as ``Athens`` or ``May 12``."""
    mathematical = _MATH_WORDS.search(text) or applies_function(text)
    return bool(_WORDS.fullmatch(text) and _LONG_WORD.search(text) and not mathematical)


def _same_spelling(gold: Answer, answer: Answer) -> bool:
    if gold.percent == answer.percent and _squeezed(gold.body) == _squeezed(answer.body):
        return gold.name in ("", answer.name)
    return _squeezed(gold.whole) == _squeezed(answer.whole)


def _squeezed(text: str) -> str:
    """Remove blanks, except between digits or letters: "1 2" is not 12, and "no on" is not "noon"."""
    return re.sub(
        r"(?<!\d) (?=\d)|(?<=\d) (?!\d)|(?<![a-zA-Z]) (?=[a-zA-Z])|(?<=[a-zA-Z]) (?![a-zA-Z])|(?<!\w) (?!\w)", "", text
    )


def _chosen(given: str, wanted: str) -> bool | None:
    """``(C) 12``, ``C.`` and ``C`` choose C; two choices are none."""
    if alone := CHOICE.fullmatch(given):
        return alone[1] == wanted
    match = _CHOICE_WITH_TEXT.fullmatch(given)
    if match is None:
        return None
    letter, text = match[1] or match[2], match[3].strip()
    return letter == wanted and (text == letter or not _OTHER_CHOICE.search(text))


def _same_words(wanted: str, given: str, is_number: bool) -> bool | None:
    if not is_words(wanted):
        return False if is_number and is_words(given) else None
    if _is_product(wanted) and (not is_words(given) or (_is_product(given) and _NO_WORD.fullmatch(wanted + given))):
        return None
    tokens, others = (re.findall(r"[^\W_]+|[^\w\s,.'’-]", text) for text in (wanted, given))
    if not all(map(_may_be_symbols, tokens)):
        tokens, others = ([token.casefold() for token in each] for each in (tokens, others))
    return is_words(given) and tokens == others


def _is_product(text: str) -> bool:
    """Whether letters in a row may be a product: ``xy``, not ``AB`` or ``odd``."""
    return re.fullmatch("[a-zA-Z]{2,}", text) is not None and not text.isupper() and _may_be_symbols(text)


def _may_be_symbols(token: str) -> bool:
    """Whether letters may name points, genes or factors: short ones, ``ABCD``, ``mMkK``."""
    letters = token.casefold()
    mixed = token not in (letters, token.upper(), letters.capitalize()) and len(token) <= 5
    short = len(token) <= 3 or letters in string.ascii_lowercase or not re.search("[aeiouy]", letters)
    return letters not in _SHORT_WORDS and (short or mixed)
