"""Answers in words: choices, names, truth values, dates.  Compared as words, never as products of letters."""

import itertools
import re
import unicodedata

from coca_mindspeed.grading.math.spelling import TEXT

_LETTER = r"[^\W\d_]"
_BETWEEN = r"[ ,.'’-]+"
_WORDS = re.compile(rf"{_LETTER}{{2,}}(?:{_BETWEEN}{_LETTER}+)*\.?")
_MATH_WORDS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|arc\w+|log|ln|exp|sqrt|pi|inf|infinity|gcd|lcm|max|min|mod|and|or)\b", re.IGNORECASE
)
_TOKEN = rf"(?:{_LETTER}+|\d+(?:st|nd|rd|th)?)"
_PHRASE = re.compile(rf"{_TOKEN}(?:{_BETWEEN}{_TOKEN})*\.?")
_LONG_WORD = re.compile(rf"(?<!{_LETTER}){_LETTER}{{3,}}(?!{_LETTER})")

_SHORT = """yes no odd all any not none one two six ten mon tue wed thu fri sat sun jan feb mar apr may jun jul aug sep
oct nov dec red day big old new top low am pm"""
_SHORT_WORDS = frozenset(_SHORT.split())
_VOWEL = re.compile(r"[aeiouy]|[^a-z]")

_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*([^()]+)")
# What follows a choice is its option's text, unless it names another choice or takes this one back.
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[B-H](?![A-Za-z])|(?<![A-Za-z\\])A(?! [a-z])(?![A-Za-z])")
_ONLY_LETTERS = re.compile(r"[ ,;/|&]*(?:(?:[A-Za-z]|and|or)(?:[ ,;/]+|$))+")
_LETTER_IN_A_LIST = re.compile(r"[,;|&]\s*[a-df-h](?:\s*[,;|&]\s*[a-h])*\s*$")
_DENIAL = re.compile(
    r"(?<![a-z])(?:not|no|never|wrong|incorrect|false|isn|cannot|neither|nor|none|or|maybe|perhaps)(?![a-z])", re.I
)


def plain_text(body: str) -> str:
    r"""The text with what stands in ``\text{}`` taken out of it, single blanks and NFC characters."""
    return " ".join(unicodedata.normalize("NFC", re.sub(TEXT, r"\1", body)).split())


def is_words(body: str) -> bool:
    """Whether an answer is nothing but words, none of which is mathematics."""
    return _WORDS.fullmatch(body) is not None and _MATH_WORDS.search(body) is None


def is_phrase(body: str) -> bool:
    """Whether an answer is words and whole numbers side by side, such as ``May 12``, and no formula."""
    return _PHRASE.fullmatch(body) is not None and _LONG_WORD.search(body) is not None and not _MATH_WORDS.search(body)


def same_words(gold: str, answer: str) -> bool:
    """Whether two answers are the same words and numbers in the same order, without punctuation.

    Nor does case count, unless the gold answer may be symbols: ``AB`` is another segment than ``ab``.
    """
    if _PHRASE.fullmatch(answer) is None:
        return False
    wanted, given = _tokens(gold), _tokens(answer)
    return wanted == given or (not all(map(_may_be_symbols, wanted)) and _folded(wanted) == _folded(given))


def _tokens(text: str) -> list[str]:
    return re.findall(_TOKEN, re.sub(r"['’]", "", text))


def _folded(tokens: list[str]) -> list[str]:
    return [token.casefold() for token in tokens]


def _may_be_symbols(token: str) -> bool:
    """Whether letters in a row may be names of points or factors: short ones, ``ABCD``, ``PQRS``, ``mMkK``."""
    letters = token.casefold()
    if letters in _SHORT_WORDS:
        return False
    in_a_row = all(ord(after) - ord(letter) == 1 for letter, after in itertools.pairwise(letters))
    mixed = token not in (letters, token.upper(), letters.capitalize())
    return len(token) <= 3 or in_a_row or not _VOWEL.search(letters) or (mixed and len(token) <= 5)


def choice(body: str) -> str | None:
    """The letter of an answer that is a single letter, as of a multiple choice."""
    match = _CHOICE.fullmatch(body)
    return match[1] if match else None


def chosen(body: str) -> str | None:
    """The one letter that an answer chooses, alone or before its option's text; None if it does not."""
    body = plain_text(body)
    if (alone := choice(body)) is not None:
        return alone
    match = _CHOICE_WITH_TEXT.fullmatch(body)
    if match is None:
        return None
    option = match[3].strip()
    others = (_OTHER_CHOICE.search, _ONLY_LETTERS.fullmatch, _LETTER_IN_A_LIST.search, _DENIAL.search)
    if any(names_another(option) for names_another in others):
        return ""
    return match[1] or match[2]
