"""Answers that are compared as they are written: ratios and times, digits in another base, products of letters."""

import re
from fractions import Fraction

from coca_mindspeed.grading.math.spelling import TEXT

_BASED = re.compile(r"\(?\s*([0-9A-Fa-f.]+)\s*\)?(?:\s*_\s*\{?\s*(\d{1,2})\s*\}?)?")
_TERM = r"\d+(?:\.\d+)?"
_RATIO = re.compile(rf"{_TERM}(?: ?: ?{_TERM}){{1,7}}")
_AS_FRACTION = re.compile(rf"\\[dtc]?frac ?\{{ ?({_TERM}) ?\}} ?\{{ ?({_TERM}) ?\}}|({_TERM}) ?/ ?({_TERM})")


_TIMES = r"\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|\*"
_PRODUCT = re.compile(rf"-?[a-zA-Z](?:(?: *(?:{_TIMES}) *| ?)[a-zA-Z]){{1,5}}")
_LETTERS = re.compile(r"-?[a-zA-Z]{2,6}")
_WORDS = "no yes on odd even true false none all any one two six ten zero five four nine may am pm"
_SHORT_WORDS = frozenset(_WORDS.split())


def same_product(gold: str, answer: str) -> bool | None:
    r"""``x\cdot y`` for ``xy``: the same letters, and capital ones (matrices, points) in the same order.

    None where it is not one product with signs and one without.
    """
    for letters, product in ((gold, answer), (answer, gold)):
        if _LETTERS.fullmatch(letters) and letters.lower() not in _SHORT_WORDS and _PRODUCT.fullmatch(product):
            factors, signs = re.subn(_TIMES, "", product)
            factors = factors.replace(" ", "")
            if not signs:
                continue
            if letters.islower():
                return sorted(letters) == sorted(factors)
            return letters == factors and "times" not in product
    return None


def same_ratio(gold: str, answer: str) -> bool | None:
    """``3:4`` or ``12:30``: the same terms, since nobody can tell a ratio from a time; or one fraction of them.

    None where neither is a ratio of numbers.
    """
    if ":" not in gold and ":" not in answer:
        return None
    wanted, given = _ratio_terms(gold), _ratio_terms(answer)
    if (wanted is None and ":" in gold) or (given is None and ":" in answer):
        return None  # of other things than numbers
    return wanted is not None and wanted == given


def _ratio_terms(body: str) -> list[Fraction] | None:
    body = re.sub(r"\{\s*:\s*\}|\\colon(?![a-zA-Z])", ":", body)
    if _RATIO.fullmatch(body):
        return [Fraction(term) for term in body.split(":")]
    match = _AS_FRACTION.fullmatch(body)
    return [Fraction(match[1] or match[3]), Fraction(match[2] or match[4])] if match else None


def same_digits(gold: str, answer: str) -> bool | None:
    """``1011_2``: the same digits and the same base; a base that one side leaves out is the other's.

    None where neither has a base.
    """
    wanted, given = _based(gold), _based(answer)
    if wanted is None or given is None or (wanted[1] is None and given[1] is None):
        return None
    same_base = wanted[1] is None or given[1] is None or wanted[1] == given[1]
    return same_base and wanted[0] == given[0]


def _based(body: str) -> tuple[str, int | None] | None:
    """Digits and base of a number in a base that has these digits; ``a_1`` is a variable with an index."""
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
