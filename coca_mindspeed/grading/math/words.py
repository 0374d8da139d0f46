"""Answers that are compared as text: words, choices, ratios and times, digits in a base, products of letters."""

import itertools
import re
import unicodedata
from fractions import Fraction

from coca_mindspeed.grading.math.spelling import TEXT

_LETTER = r"[^\W\d_]"
_BETWEEN = r"[ ,.'’-]+"
_WORDS = re.compile(rf"{_LETTER}{{2,}}(?:{_BETWEEN}{_LETTER}+)*\.?")
_MATH_WORDS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|arc\w+|log|ln|exp|sqrt|pi|inf|infinity|gcd|lcm|max|min|mod|and|or)\b", re.IGNORECASE
)
_WORD_TOKEN = rf"(?:{_LETTER}+|\d+(?:st|nd|rd|th)?)"
_PHRASE = re.compile(rf"{_WORD_TOKEN}(?:{_BETWEEN}{_WORD_TOKEN})*\.?")
_LONG_WORD = re.compile(rf"(?<!{_LETTER}){_LETTER}{{3,}}(?!{_LETTER})")

_SHORT = """yes no odd all any not none one two six ten mon tue wed thu fri sat sun jan feb mar apr may jun jul aug sep
oct nov dec red day big old new top low am pm"""
_SHORT_WORDS = frozenset(_SHORT.split())
_VOWEL = re.compile(r"[aeiouy]|[^a-z]")

_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*([^()]+)")
# The text after a choice must not name another choice or withdraw this one.
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[B-H](?![A-Za-z])|(?<![A-Za-z\\])A(?! [a-z])(?![A-Za-z])")
_ONLY_LETTERS = re.compile(r"[ ,;/|&]*(?:(?:[A-Za-z]|and|or)(?:[ ,;/]+|$))+")
_LETTER_IN_A_LIST = re.compile(r"[,;|&]\s*[a-df-h](?:\s*[,;|&]\s*[a-h])*\s*$")
_DENIAL = re.compile(
    r"(?<![a-z])(?:not|no|never|wrong|incorrect|false|isn|cannot|neither|nor|none|or|maybe|perhaps)(?![a-z])", re.I
)


def plain_text(body: str) -> str:
    r"""The text without ``\text{}``, with single blanks, in NFC."""
    return " ".join(unicodedata.normalize("NFC", re.sub(TEXT, r"\1", body)).split())


def is_words(body: str) -> bool:
    return _WORDS.fullmatch(body) is not None and _MATH_WORDS.search(body) is None


def is_phrase(body: str) -> bool:
    """Whether an answer consists of words and whole numbers, such as ``May 12``."""
    return _PHRASE.fullmatch(body) is not None and _LONG_WORD.search(body) is not None and not _MATH_WORDS.search(body)


def same_words(gold: str, answer: str) -> bool:
    """Whether two answers have the same words and numbers in order, ignoring punctuation.

    Case is ignored too, unless the gold answer may be symbols: the segment ``AB`` is not ``ab``.
    """
    if _PHRASE.fullmatch(answer) is None:
        return False
    wanted, given = _tokens(gold), _tokens(answer)
    return wanted == given or (not all(map(_may_be_symbols, wanted)) and _folded(wanted) == _folded(given))


def _tokens(text: str) -> list[str]:
    return re.findall(_WORD_TOKEN, re.sub(r"['’]", "", text))


def _folded(tokens: list[str]) -> list[str]:
    return [token.casefold() for token in tokens]


def _may_be_symbols(token: str) -> bool:
    """Whether letters may name points or factors: short ones, ``ABCD``, ``PQRS``, ``mMkK``."""
    letters = token.casefold()
    if letters in _SHORT_WORDS:
        return False
    in_a_row = all(ord(after) - ord(letter) == 1 for letter, after in itertools.pairwise(letters))
    mixed = token not in (letters, token.upper(), letters.capitalize())
    return len(token) <= 3 or in_a_row or not _VOWEL.search(letters) or (mixed and len(token) <= 5)


def choice(body: str) -> str | None:
    match = _CHOICE.fullmatch(body)
    return match[1] if match else None


def chosen(body: str) -> str | None:
    """The letter that an answer chooses, alone or before its option's text; "" if it names several; else None."""
    body = plain_text(body)
    if (alone := choice(body)) is not None:
        return alone
    match = _CHOICE_WITH_TEXT.fullmatch(body)
    if match is None:
        return None
    option = match[3].strip()
    excluded = (_OTHER_CHOICE.search, _ONLY_LETTERS.fullmatch, _LETTER_IN_A_LIST.search, _DENIAL.search)
    if any(matches(option) for matches in excluded):
        return ""
    return match[1] or match[2]


_BASED = re.compile(r"\(?\s*([0-9A-Fa-f.]+)\s*\)?(?:\s*_\s*\{?\s*(\d{1,2})\s*\}?)?")
_TERM = r"\d+(?:\.\d+)?"
_RATIO = re.compile(rf"{_TERM}(?: ?: ?{_TERM}){{1,7}}")
_AS_FRACTION = re.compile(rf"\\[dtc]?frac ?\{{ ?({_TERM}) ?\}} ?\{{ ?({_TERM}) ?\}}|({_TERM}) ?/ ?({_TERM})")


_TIMES = r"\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|\*"
_PRODUCT = re.compile(rf"-?[a-zA-Z](?:(?: *(?:{_TIMES}) *| ?)[a-zA-Z]){{1,5}}")
_LETTERS = re.compile(r"-?[a-zA-Z]{2,6}")
_NO_PRODUCT_WORDS = "no yes on odd even true false none all any one two six ten zero five four nine may am pm"
_NO_PRODUCTS = frozenset(_NO_PRODUCT_WORDS.split())


def same_product(gold: str, answer: str) -> bool | None:
    r"""``x\cdot y`` for ``xy``: the same letters; capital letters (matrices, points) also in the same order.

    None unless one side is a product with signs and the other one without.
    """
    for letters, product in ((gold, answer), (answer, gold)):
        if _LETTERS.fullmatch(letters) and letters.lower() not in _NO_PRODUCTS and _PRODUCT.fullmatch(product):
            factors, signs = re.subn(_TIMES, "", product)
            factors = factors.replace(" ", "")
            if not signs:
                continue
            if letters.islower():
                return sorted(letters) == sorted(factors)
            return letters == factors and "times" not in product
    return None


def same_ratio(gold: str, answer: str) -> bool | None:
    """``3:4`` or ``12:30``: the same terms, or one fraction of them; None if neither side is a ratio of numbers."""
    if ":" not in gold and ":" not in answer:
        return None
    wanted, given = _ratio_terms(gold), _ratio_terms(answer)
    if (wanted is None and ":" in gold) or (given is None and ":" in answer):
        return None
    return wanted is not None and wanted == given


def _ratio_terms(body: str) -> list[Fraction] | None:
    body = re.sub(r"\{\s*:\s*\}|\\colon(?![a-zA-Z])", ":", body)
    if _RATIO.fullmatch(body):
        return [Fraction(term) for term in body.split(":")]
    match = _AS_FRACTION.fullmatch(body)
    return [Fraction(match[1] or match[3]), Fraction(match[2] or match[4])] if match else None


def same_digits(gold: str, answer: str) -> bool | None:
    """``1011_2``: the same digits and base; a missing base is the other side's. None if neither side has a base."""
    wanted, given = _based(gold), _based(answer)
    if wanted is None or given is None or (wanted[1] is None and given[1] is None):
        return None
    same_base = wanted[1] is None or given[1] is None or wanted[1] == given[1]
    return same_base and wanted[0] == given[0]


def _based(body: str) -> tuple[str, int | None] | None:
    """Digits and base of a number; None for ``a_1`` or digits that the base does not have."""
    if "_" in body:
        body = re.sub(TEXT, r"\1", body)
    match = _BASED.fullmatch(body)
    if match is None:
        return None
    base = int(match[2]) if match[2] else None
    digits = match[1].lower()
    if not any(map(str.isdigit, digits)) and (base is None or len(digits) == 1):
        return None
    if base is not None and not all(digit == "." or int(digit, 16) < base for digit in digits):
        return None
    return digits, base
