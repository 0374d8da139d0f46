r"""Read the words behind a value: a unit, counted things, or words that change the value.

All spellings of a unit have one name: ``5 feet per second`` is ``5 \text{ft}/\text{s}``; ``12 cm`` is not ``12 m``.
Nothing is converted.
"""

import re
from collections import Counter
from fractions import Fraction

#: Counted things (``12 apples``), and words that name neither a unit nor things (``in total``).
COUNTED, UNNAMED = "", "unit"

# The units of real answers. The first name is the canonical one; longer names may have a plural s.
_NAMES = """
cm centimeter centimetre; mm millimeter millimetre; km kilometer kilometre; m meter metre; in inch inches
ft foot feet; yd yard; mi mile; kg kilogram; mg milligram; g gm gms gram; lb lbs pound; oz ounce; L l liter litre
mL ml milliliter; gallon; quart; pint; cup; tablespoon; teaspoon; ton tonne; acre; s sec second; min minute
h hr hrs hour; day; week; month; year yr; degree °; celsius °C; fahrenheit °F; radian rad; K kelvin; N newton; J joule
W watt; V volt; A amp ampere; Pa pascal; Hz hertz; mol mole; kPa; kN; kJ; kW; kHz; MHz; calorie; dollar buck USD usd $
cent ¢; euro EUR €; GBP £; rupee Rs; am a.m AM A.M; pm p.m PM P.M; unit
Ω ohm; kΩ kiloohm kilohm; MΩ megaohm megohm; μm micrometer micrometre micron; μs microsecond; μg microgram
μL μl microliter; μF microfarad; μC microcoulomb; μA microampere; μV microvolt; μW microwatt
"""
_ENTRIES = [entry.split() for entry in _NAMES.strip().replace("\n", ";").split(";")]
UNITS = {name: entry[0] for entry in _ENTRIES for name in entry}
UNITS |= {f"{name}s": unit for name, unit in UNITS.items() if len(name) > 2 and name.isalpha()}
_NOT_IN_PRODUCTS = {"dollar", "cent", "euro", "GBP", "rupee", "am", "pm", "unit", "day", "week", "month", "year"}
# Letters outside of \text{} that are units behind a number and a blank; and units even without a blank: 12cm, not 12m.
_SYMBOLS = "m g s h l L cm mm km kg mg mL ml lb oz ft yd mi hr yr am pm AM PM in K N J W V A Pa Hz kN kJ kW"
_PLAIN_SYMBOLS = frozenset(_SYMBOLS.split())
_JOINED_NAMES = "cm mm km kg mg ml mL ft lb lbs oz min hr am pm AM PM a.m p.m"
_JOINED = frozenset(_JOINED_NAMES.split())

_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\text\{([^{}]*)\}", r" \1 "),
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\^\s*\{\s*([-+]?\d)\s*\}", r"^\1"),
        (r"(?:\{\s*\})?\s*\^\\circ\s*", "°"),
        (r"(?<![a-zA-Z])per(?![a-zA-Z])", "/"),
        (r"\\mu\s*(?=[a-zA-Z])", "μ"),
        (r"(?:(?<![a-zA-Z])([kM])\s*)?\\Omega(?![a-zA-Z])\s*", r"\1Ω"),
        (r"(?i)\b(?:square|sq\.?) ([a-z]+)", r"\1^2"),
        (r"(?i)\b(?:cubic|cu\.?) ([a-z]+)", r"\1^3"),
        (r"(?i)\bmph\b", "mi/h"),
        (r"(?i)\bkmph\b", "km/h"),
    )
]
_FACTOR = re.compile(
    r"\s*(?P<per>/)?\s*(?P<name>°[CF]?|\\?\$|[€£¢]|[a-zA-ZμΩ]+(?:\.[a-zA-Z]+)*)\.?(?:\s*\^(?P<power>[-+]?\d))?"
)

# Words behind a number that change its value, withdraw it, or belong to a date: no counted things.
_OTHER_WORDS = """
squared cubed factorial subfactorial over plus minus time divided multiplied by modulo choose base basis root order
power raised exponent exponential logarithm point dot decimal comma half halves third quarter dozen score gross grosse
grand myriad lakh crore mil mill mille bp bip permille cent percent percentage percentile pct ppm ppb ppt twice thrice
double triple quadruple fold reciprocal inverse opposite conjugate complement binary octal hexadecimal thou mega giga
sin cos tan cot sec csc arcsin arccos arctan log exp sqrt gcd lcm infinity mod and nor more less fewer greater than
least most not never none neither either maybe perhaps possibly isn are was cannot unless when except without but
instead rather wrong incorrect false negative imaginary prime equal does has have fail versus exactly roughly january
february march april may june july august september october november december monday tuesday wednesday thursday friday
saturday sunday bce is
"""
_NO_THINGS = frozenset(_OTHER_WORDS.split())
# 5 thirtieths, 5 doubled, 5 theta; but 5 beta testers
_NUMBER_WORD = re.compile(
    r"""(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|hundred|thousand|\w*illion
    |googol)(?:e?s|ths?)?|(?:twen|thir|for|four|fif|six|seven|eigh|nine)t(?:y|ies|ieths?)|(?:fif|eigh|nin|twelf)ths?
    |\w+(?:fold|uple|upled)""",
    re.VERBOSE,
)
_CHANGING_END = re.compile(
    r"(?!\w*eed$)\w{3,}ed|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|omega"
)
# Behind a unit or a counted thing these begin a remark.
_REMARK_WORDS = """
per a an each every apiece of in for from at on with away apart long tall wide high deep thick old later ago earlier
left remaining total altogether overall together only here there then
"""
_REMARKS = frozenset(_REMARK_WORDS.split())
_IRREGULAR = "people men women children mice geese teeth dice sheep fish police vertices toys"
_IRREGULAR_PLURALS = frozenset(_IRREGULAR.split())
_BEGIN = re.compile(
    r"(?:\{\s*\}\s*)?\^\\circ|\\(?:text|\$|Omega|mu|frac(?=\s*\{\s*\\text))(?![a-zA-Z])|(?<![a-zA-Z\\{])[a-zA-Z€£¢]"
)


def unit_starts(text: str) -> list[int]:
    """Where a unit may begin, in the last 60 characters: at a letter or sign that is not inside a longer name."""
    return [match.start() for match in _BEGIN.finditer(text, max(0, len(text) - 60)) if match.start()]


def read_unit(words: str, number: Fraction | None, spaced: bool) -> str | None:
    """Return the unit behind a value, ``COUNTED``, ``UNNAMED``, or None if the words are none of these.

    Args:
        number: the value; behind an expression (None) letters are more often variables.
        spaced: whether a blank separates the words from the value, so that they cannot be a variable.
    """
    upright, text = r"\text" in words, words
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    exponents: Counter[str] = Counter()
    names: list[str] = []
    end = 0
    while (match := _FACTOR.match(text, end)) and (unit := _unit(match["name"], text[match.end() :])):
        exponents[unit] += int(match["power"] or 1) * (-1 if match["per"] else 1)
        names.append(match["name"])
        end = match.end()
    over = [unit for unit, power in exponents.items() if power > 0]
    if len(over) > 1 and not _NOT_IN_PRODUCTS.isdisjoint(over):
        return None  # 5 m dollars are millions
    rest = " ".join(text[end:].split()).strip(".")
    product = " ".join(sorted(unit if power == 1 else f"{unit}^{power}" for unit, power in exponents.items() if power))
    product = UNNAMED if UNNAMED in exponents else product
    if end and not rest:
        return product if upright or _is_plain_unit(product, names, spaced, number is not None) else None
    if number is None or not (upright or spaced):
        return None
    if end and is_remark(rest) and rest.split()[0] in _REMARKS:
        return product
    return _counted(" ".join(text.replace("/", " per ").split()), number)


def _unit(name: str, rest: str) -> str | None:
    name = name.removeprefix("\\")
    if name == "in" and re.match(r" [a-zA-Z]", rest):
        return None
    return UNITS.get(name) or (UNITS.get(name.lower()) if len(name) > 1 else None)


def _is_plain_unit(unit: str, names: list[str], spaced: bool, behind_number: bool) -> bool:
    r"""Whether names outside of ``\text{}`` are a unit and not variables."""
    if not all(name.isascii() and name.isalpha() for name in names):
        return "μ" not in names[0] and (spaced or "Ω" not in names[0])  # °, €, p.m.; without \\text{}, \mu is a letter
    if not behind_number:
        return spaced and all(len(name) > 1 and name != "in" for name in names)
    if not spaced:
        return names[0] in _JOINED
    if not all(len(name) > 2 or name in _PLAIN_SYMBOLS for name in names):
        return False
    return len(names) == 1 or any(len(name) > 1 for name in names) or unit in ("m s^-1", "m s^-2", "m^2", "m^3")


def is_remark(text: str) -> bool:
    """Whether words leave the value before them unchanged: no operation, denial, date, function or variable."""
    if re.fullmatch(r"[a-zA-Z][a-zA-Z .'-]*", text) is None:
        return False
    words = re.split(r"[ .-]+", text.lower().strip(". -"))
    if _CHANGING_END.fullmatch(words[-1]):
        return False
    return not any(
        {word, word.removesuffix("s")} & _NO_THINGS
        or _NUMBER_WORD.fullmatch(word)
        or (len(word) < 3 and word not in _REMARKS)
        for word in words
    )


def _counted(text: str, number: Fraction) -> str | None:
    """``COUNTED`` for things (``red apples``), ``UNNAMED`` for ``in total`` or ``a day``, else None."""
    if not is_remark(text):
        return None
    words = text.lower().replace("-", " ").split()
    things = words[: next((place for place, word in enumerate(words) if word in _REMARKS), len(words))]
    if not things:
        return UNNAMED if len(words) > 1 or len(words[0]) > 2 else None
    plural = len(things[-1]) > 3 and things[-1].endswith("s") and not things[-1].endswith(("ss", "us", "is"))
    several = number.denominator == 1 and abs(number) > 1
    return COUNTED if not several or plural or things[-1] in _IRREGULAR_PLURALS else None
