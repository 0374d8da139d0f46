r"""Compare two answers without algebra: numbers, ratios, digits in a base, spellings, choices and words.

Everything is exact and linear in the text, so that it can run in the caller's process.
"""

import re
import unicodedata
from fractions import Fraction

from coca_mindspeed.grading.math.normalise import FUNCTION_NAMES, Answer
from coca_mindspeed.grading.math.units import same_unit
from coca_mindspeed.grading.verdict import Outcome, Verdict

_RIGHT, _WRONG = Verdict(Outcome.RIGHT), Verdict(Outcome.WRONG)

_LETTER = r"[^\W\d_]"
_BETWEEN = r"[ ,.'’-]+"
_WORD = rf"(?:{_LETTER}+|\d+(?:st|nd|rd|th)?)"
_WORDS = re.compile(rf"{_LETTER}{{2,}}\.?|{_WORD}(?:{_BETWEEN}{_WORD})+\.?")
_MATH_WORDS = re.compile(rf"\b(?:{FUNCTION_NAMES}|sqrt|pi|infinity|gcd|lcm|max|min|mod|and|or)\b", re.IGNORECASE)


def plain_text(body: str) -> str:
    r"""The text without ``\text{}``, with single blanks, in NFC."""
    return " ".join(unicodedata.normalize("NFC", re.sub(r"\\text\{([^{}]*)\}", r"\1", body)).split())


def is_words(text: str) -> bool:
    """Whether an answer consists of words and whole numbers, such as ``Athens`` or ``May 12``."""
    long_word = re.search(rf"(?<!{_LETTER}){_LETTER}{{3,}}|^{_LETTER}{{2}}\.?$", text)
    return _WORDS.fullmatch(text) is not None and long_word is not None and not _MATH_WORDS.search(text)


CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*(.+)")
# The option's text must not name another choice.
_OTHER_CHOICE = re.compile(
    r"(?<![A-Za-z\\])[B-H](?![A-Za-z])|(?<![A-Za-z\\])A(?! [a-z])(?![A-Za-z])|[,;|]\s*[a-df-h]\s*$|^[,;|/&]"
    r"|^[A-Za-z](?:[ ,;/]+[A-Za-z])+$|^(?:or|and|maybe|perhaps|not [A-H])\b"
    r"|\b(?:is|isn't) (?:wrong|incorrect|not)\b|^wrong$"
)
_TERM = r"\d+(?:\.\d+)?"
_RATIO = re.compile(rf"{_TERM}(?: ?: ?{_TERM}){{1,7}}")
_AS_FRACTION = re.compile(rf"\\frac ?\{{ ?({_TERM}) ?\}} ?\{{ ?({_TERM}) ?\}}|({_TERM}) ?/ ?({_TERM})")
_DIGITS = re.compile(r"([0-9A-Fa-f.]+)(?:\s*_\s*\{?\s*(\d{1,2})\s*\}?)?")
_PRODUCT = re.compile(r"-?[a-zA-Z](?:(?: *(?:\\cdot|\\times|\*) *| )[a-zA-Z]){1,5}")
_LETTERS = re.compile(r"-?[a-zA-Z]{2,6}")
ROUNDED = Fraction(1, 10**6)  # relative error of a gold answer that is a rounded decimal
DOUBLE_DIGITS = 15  # significant digits of a program's output, which is as good as the exact value


def plain_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """The verdict on two answers without algebra, or None if it takes some."""
    if not answer.body or not gold.body:
        return Verdict(Outcome.UNGRADABLE, "the gold answer is empty") if not gold.body else _WRONG
    if not same_unit(gold.unit, answer.unit):
        return Verdict(Outcome.WRONG, f"the unit is {answer.unit}, not {gold.unit}")
    found = None
    if gold.value is not None and answer.value is not None:
        found = (not gold.name or not answer.name or gold.name == answer.name) and same_number(gold, answer)
    for compare in (_same_ratio, _same_digits, _same_letters, _same_spelling, _same_choice, _same_words):
        found = compare(gold, answer) if found is None else found
    return None if found is None else _RIGHT if found else _WRONG


def same_number(gold: Answer, answer: Answer) -> bool:
    """Compare two numbers by the rules of docs/grading.md for decimals and percent signs."""
    assert gold.value is not None
    assert answer.value is not None
    if gold.percent == answer.percent:
        return _close(gold, answer, gold.value, answer.value)
    if _asked_in_percent(answer if gold.percent else gold) and _close(gold, answer, gold.value, answer.value):
        return True
    return _close(
        gold, answer, gold.value / (100 if gold.percent else 1), answer.value / (100 if answer.percent else 1)
    )


def _asked_in_percent(plain: Answer) -> bool:
    """Whether a number without the sign may be meant in percent: 50 or 62.5, but not .125 and not 1/8."""
    return plain.value is not None and abs(plain.value) >= 1 and re.fullmatch(r"[-+]?\s*[\d.]+", plain.body) is not None


def _close(gold: Answer, answer: Answer, a: Fraction, b: Fraction) -> bool:
    if a == b:
        return True
    # Only a value without a finite decimal form may be rounded.
    if gold.decimals and not answer.decimals and not terminates(b):
        return abs(a - b) <= ROUNDED * abs(a)
    return answer.decimals >= DOUBLE_DIGITS and not terminates(a) and abs(a - b) <= abs(a) / 10 ** (DOUBLE_DIGITS - 1)


def terminates(value: Fraction) -> bool:
    return bool(10 ** value.denominator.bit_length() % value.denominator == 0)


def _same_ratio(gold: Answer, answer: Answer) -> bool | None:
    """``3:4`` or ``12:30``: the same terms, or one fraction of them; None if neither side is a ratio of numbers."""
    if ":" not in gold.body and ":" not in answer.body:
        return None
    wanted, given = _ratio_terms(gold.body), _ratio_terms(answer.body)
    if (wanted is None and ":" in gold.body) or (given is None and ":" in answer.body):
        return True if gold.body.replace(" ", "") == answer.body.replace(" ", "") else None
    return wanted is not None and wanted == given


def _ratio_terms(body: str) -> list[Fraction] | None:
    if _RATIO.fullmatch(body):
        return [Fraction(term) for term in body.split(":")]
    match = _AS_FRACTION.fullmatch(body)
    return [Fraction(term) for term in match.groups() if term] if match else None


def _same_digits(gold: Answer, answer: Answer) -> bool | None:
    """``1011_2``: the same digits and base; a missing base is the other side's. None if neither side has a base."""
    wanted, given = (_DIGITS.fullmatch(plain_text(side.body)) for side in (gold, answer))
    if wanted is None or given is None or (wanted[2] is None and given[2] is None):
        return None
    for match in (wanted, given):
        digits = re.sub(r"\.", "", match[1])
        base = int(match[2] or 0)
        if (digits.isalpha() and (not base or len(digits) == 1)) or (
            base and any(int(digit, 16) >= base for digit in digits)
        ):
            return None  # a_1, a_16
    return wanted[1].lower() == given[1].lower() and (None in (wanted[2], given[2]) or wanted[2] == given[2])


def _same_letters(gold: Answer, answer: Answer) -> bool | None:
    r"""``xy`` and ``x\cdot y``: the same letters; capital letters (matrices, points) also in the same order."""
    texts = [plain_text(side.body) for side in (gold, answer)]
    joined = [_LETTERS.fullmatch(text) is not None for text in texts]
    if joined[0] == joined[1] or not _PRODUCT.fullmatch(texts[joined[0]]):
        return None
    letters = [re.sub(r"\\cdot|\\times|[* ]", "", text) for text in texts]
    if letters[joined[1]].casefold() in _NO_PRODUCTS:
        return False
    if all(each.lstrip("-").islower() for each in letters):
        return sorted(letters[0]) == sorted(letters[1])
    return letters[0] == letters[1] and r"\times" not in texts[joined[0]]


_NO_PRODUCT_WORDS = "no yes on odd even true false none all any one two six ten zero five four nine may am pm"
_NO_PRODUCTS = frozenset(_NO_PRODUCT_WORDS.split())


def _same_spelling(gold: Answer, answer: Answer) -> bool | None:
    if (
        gold.percent == answer.percent
        and _squeezed(gold.body) == _squeezed(answer.body)
        and gold.name in ("", answer.name)
    ):
        return True
    return True if _squeezed(gold.whole) == _squeezed(answer.whole) else None


def _squeezed(text: str) -> str:
    # Digits or letters separated by a blank stay apart: "1 2" is not 12, and "no on" is not "noon".
    return re.sub(
        r"(?<!\d) (?=\d)|(?<=\d) (?!\d)|(?<![a-zA-Z]) (?=[a-zA-Z])|(?<=[a-zA-Z]) (?![a-zA-Z])|(?<!\w) (?!\w)", "", text
    )


def _same_choice(gold: Answer, answer: Answer) -> bool | None:
    """``(C) 12``, ``C.`` and ``C`` choose C; two choices are none."""
    wanted = CHOICE.fullmatch(plain_text(gold.body))
    if wanted is None:
        return None
    given = plain_text(answer.body)
    if alone := CHOICE.fullmatch(given):
        return alone[1] == wanted[1]
    match = _CHOICE_WITH_TEXT.fullmatch(given)
    if match is None:
        return None
    return _OTHER_CHOICE.search(match[3].strip()) is None and (match[1] or match[2]) == wanted[1]


def _same_words(gold: Answer, answer: Answer) -> bool | None:
    wanted, given = plain_text(gold.body), plain_text(answer.body)
    if is_words(wanted):
        same_case = all(map(_may_be_symbols, _tokens(wanted)))
        return is_words(given) and (
            _tokens(wanted) == _tokens(given)
            or (not same_case and _tokens(wanted.casefold()) == _tokens(given.casefold()))
        )
    return False if is_words(given) and gold.value is not None else None


def _tokens(text: str) -> list[str]:
    return re.findall(r"[^\W_]+|[^\w\s,.'’-]", text)


def _may_be_symbols(token: str) -> bool:
    """Whether letters may name points, genes or factors: short ones, ``ABCD``, ``mMkK``."""
    letters = token.casefold()
    if letters in _NO_PRODUCTS | {"red", "day", "mon", "tue", "wed", "thu", "fri", "sat", "sun", "not", "top", "low"}:
        return False
    in_a_row = letters in "abcdefghijklmnopqrstuvwxyz"
    mixed = token not in (letters, token.upper(), letters.capitalize())
    return len(token) <= 3 or in_a_row or not re.search("[aeiouy]", letters) or (mixed and len(token) <= 5)
