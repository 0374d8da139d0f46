"""Units after a number: which words are one, and one name for each, so that ``12 cm`` is not ``12 m``."""

import re
import string

_NAMES = {
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms kilo kilos",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "l": "l L liter liters litre litres",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "mph": "mph",
    "km/h": "km/h kph kmh km/hr",
    "m/s": "m/s",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
    "dollar": "dollar dollars USD usd",
    "cent": "cent cents",
    "euro": "euro euros EUR",
    "rupee": "rupee rupees Rs",
    "am": "am AM a.m A.M",
    "pm": "pm PM p.m P.M",
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_PER = {("mi", "h"): "mph", ("km", "h"): "km/h", ("m", "s"): "m/s"}
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_CURRENCIES = {"$": "dollar", "\\$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro", "rs": "rupee", "₹": "rupee"}

# Without a space, letters after a number are a unit only if they can be nothing else: 12cm, but not 12m.
_SAFE_WITHOUT_SPACE = {"cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "lb", "lbs", "oz", "mph", "min", "hr"}

# Words after a number that change its value, take it back or belong to a date: never a unit.  Number words are made of
# few stems, so that their grammar is listed and not each of them.
_OPERATIONS = """
squared cubed factorial over plus minus times divided multiplied by mod modulo choose base root power raised exponent
exponential point dot decimal comma half halves third thirds quarter quarters dozen dozens score gross lakh lakhs crore
crores twice thrice double triple quadruple fold reciprocal inverse binary octal hex hexadecimal percent
"""
_SENTENCES = """
and or nor to of more less fewer greater than least most not no never none neither either maybe perhaps possibly is isn
are was be cannot if unless when except without but instead rather wrong incorrect false negative imaginary prime
"""
_DATES = """
january february march april may june july august september october november december
monday tuesday wednesday thursday friday saturday sunday bc bce ad ce
"""
_NOT_UNITS = frozenset((_OPERATIONS + _SENTENCES + _DATES).split())
_NUMBER_WORD = re.compile(
    r"""(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|hundred|thousand|\w*illion|\w*illiard
    |googol\w*)(?:e?s|ths?)?
    |(?:twen|thir|for|four|fif|six|seven|eigh|nine)t(?:y|ies|ieths?)
    |(?:fif|eigh|nin|twelf)ths?
    |\w+(?:fold|uple|upled)""",
    re.VERBOSE,
)
# Functions and pi multiply what stands before them; so do Greek letters, but there are beta testers.
_FUNCTIONS = re.compile(
    r"a?(?:sin|cos|tan|cot|csc)h?|arc(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|gcd|lcm|pi|infinity|infty"
)
_GREEK = re.compile(r"alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|omega")
# Single letters that are units beside others; case tells newtons from a variable.
_SYMBOLS = frozenset("NWJVAKCFT")
_COMPOUND = frozenset(("N m", "V A", "A h", "W h", "kW h", "J s"))
# "5 doubled", "5 inverted": what was done to a number is no thing that is counted.
_DONE_TO_IT = re.compile(r"(?!\w*eed$)\w{3,}ed")


def may_be_unit(name: str, spaced: bool = True) -> bool:
    """Whether words behind a number can be its unit: known, or any thing that is counted (``apples``).

    Args:
        name: the words, without a power.
        spaced: whether something separates them from the number, so that they cannot be a variable.
    """
    if re.fullmatch(r"[a-zA-Z][a-zA-Z /.^23]*", name) is None:
        return False
    words = name.lower().replace("/", " ").split()
    power_of_unit = len(words) == 2 and words[0] in _UNITS and words[1] in ("squared", "cubed")
    if not power_of_unit and (any(map(_changes_the_value, words)) or _DONE_TO_IT.fullmatch(words[-1])):
        return False
    if any(map(_FUNCTIONS.fullmatch, words)) or _GREEK.fullmatch(words[-1]) or _holds_variables(name):
        return False
    return name in _SAFE_WITHOUT_SPACE or (spaced and (name in _UNITS or len(name) >= 3))


def _changes_the_value(word: str) -> bool:
    return word in _NOT_UNITS or _NUMBER_WORD.fullmatch(word) is not None


def _holds_variables(name: str) -> bool:
    """Whether words are or hold letters that are no unit: ``xyz``, ``x y``, but not ``m per s`` or ``T shirts``."""
    words = name.replace("/", " / ").split()
    if any(len(word) > 2 and word.lower() in string.ascii_lowercase for word in words):
        return True
    if len(words) == 1 or name in _COMPOUND:
        return False
    known = any(
        word == "/" or word.lower() == "per" or word.lower() in _POWER_WORDS or (len(word) > 1 and _lookup(word))
        for word in words
    )
    return any(
        len(word) == 1
        and word != "/"
        and not (known and (_lookup(word) or word in _SYMBOLS))
        and not len(after) > 2  # two dollars a ticket, 5 T shirts
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def is_known_unit(name: str) -> bool:
    """Whether words can only be a unit, even behind an expression, where a single letter would be a variable."""
    return len(name) > 1 and all(
        word in ("per", "unit", "units") or word in _POWER_WORDS or (len(word) > 1 and word != "in" and _lookup(word))
        for word in name.split()
    )


def canonical_unit(name: str, power: str | None = None) -> str:
    """One name for a unit and its power (``cm^2`` of ``sq cm``); ``""`` for words that are no known unit."""
    if written := re.search(r"\^\s*\{?([23])\}?$", name):
        name, power = name[: written.start()], written[1]
    words = [word.rstrip(".") for word in name.split()]
    power = next((_POWER_WORDS[word] for word in words if word in _POWER_WORDS), power)
    known = [_lookup(word) for word in words if word not in _POWER_WORDS]
    if "per" in known and len(known) == 3:
        unit = _PER.get((known[0], known[2]), "")
    else:
        unit = known[0] if len(known) == 1 and known[0] != "per" else ""
    return f"{unit}^{power}" if unit and power and power != "1" else unit


def _lookup(word: str) -> str:
    return "per" if word == "per" else _UNITS.get(word) or _UNITS.get(word.lower(), "")


def currency_unit(symbol: str) -> str:
    symbol = symbol.lower().removesuffix(".")
    return _CURRENCIES.get(symbol, symbol)
