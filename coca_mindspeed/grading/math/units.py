r"""Read the words behind a value: a unit, counted things, or words that change the value.

All spellings of a unit have one name: ``9.8 m/s^2`` is ``9.8\,m\,s^{-2}``; ``12 cm`` is not ``12 m``. Nothing is
converted.
"""

import re
import string
from collections import Counter

#: Counted things (``12 apples``), and words that name neither a unit nor things (``in total``).
COUNTED, UNNAMED = "", "unit"

# The first name is canonical. Units of the first table take prefixes.
_PREFIXES = {"n": "nano", "μ": "micro", "m": "milli", "c": "centi", "d": "deci", "k": "kilo", "M": "mega", "G": "giga"}
_WITH_PREFIXES = """
m meter metre; g gram gramme; s second; L liter litre; N newton; J joule; W watt; V volt; A ampere amp; C coulomb
F farad; T tesla; Pa pascal; Hz hertz; Ω ohm; mol mole; eV electronvolt; cal calorie; B byte; Wh
"""
_OTHERS = """
in inch inches; ft foot feet; yd yard yards; mi mile miles; lb lbs pound pounds; oz ounce ounces; kg kilo kilos kgs
cm cms; km kms; mm mms; g gm gms; L l; mL ml mls; ton tons tonne tonnes; s sec secs; min mins minute minutes
h hr hrs hour hours; day days; week weeks; month months; year years yr yrs; lightyear lightyears; decade decades
century centuries; pint pints pt; quart quarts qt; gallon gallons gal; cup cups; tablespoon tablespoons tbsp
teaspoon teaspoons tsp; acre acres; hectare hectares ha; K kelvin kelvins; celsius °C; fahrenheit °F; radian radians rad
degree degrees deg °; atm; dB; dollar dollars bucks USD usd $; cent cents ¢; euro euros EUR €; rupee rupees Rs INR ₹
yuan RMB CNY; yen JPY; GBP £; ¥; am a.m AM A.M; pm p.m PM P.M; unit units
"""
# Pairs of names that may mean the same unit.
_ALIASES = frozenset(
    map(frozenset, (("celsius", "degree"), ("fahrenheit", "degree"), ("celsius", "C"), ("fahrenheit", "F"),
                    ("¥", "yuan"), ("¥", "yen"), ("GBP", "lb")))
)  # fmt: skip
_MONEY = frozenset(("dollar", "cent", "euro", "GBP", "rupee", "yuan", "yen"))


def _entries(table: str) -> list[list[str]]:
    return [entry.split() for entry in table.strip().replace("\n", ";").split(";")]


def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for symbol, *words in _entries(_WITH_PREFIXES):
        for prefix, long_prefix in {"": "", **_PREFIXES}.items():
            if prefix not in ("c", "d") or symbol in "mgL":
                forms = (symbol if prefix == "" else prefix + symbol, *(long_prefix + word for word in words))
                names |= dict.fromkeys((*forms, *(f"{form}s" for form in forms[1:])), prefix + symbol)
    for canonical, *others in _entries(_OTHERS):
        names |= dict.fromkeys((canonical, *others), canonical)
    return names


_UNITS = _names()
_FACTORS = frozenset(_UNITS.values()) - _MONEY - {"am", "pm", "unit", "day", "week", "month", "year"}
# Letters outside of \text{} may be variables. Behind a number and a blank these are units, like all longer names.
_SYMBOLS = """
m g s h l L N J V W K A cm mm km nm dm kg mg ms ns mL ml cL dL kN kJ MJ kW MW GW mW kV mV mA Hz Pa eV kB MB GB lb oz
ft yd mi hr yr am pm AM PM in Rs Wh ha dB pt qt CM KM KG ML FT LB IN HR Km Kg Cm
"""
_PLAIN_SYMBOLS = frozenset(_SYMBOLS.split())
# Units of several single letters; others, like m/g, may be variables.
_COMPOUND_NAMES = "m s^-1;m s^-2;m^2 s^-1;m^3 s^-1;h^-1 m;L s^-1;L h^-1;L^-1 g;N m;N s;J s;A h;W h;m^2;m^3"
_COMPOUNDS = frozenset(_COMPOUND_NAMES.split(";"))
# Units even without a blank: 12cm, but not 12m.
_JOINED_NAMES = "cm mm km kg mg ml mL ft lb lbs oz mph kmph min hr Hz kHz kPa kWh mol am pm AM PM a.m p.m"
_JOINED = frozenset(_JOINED_NAMES.split())

_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\text\{([^{}]*)\}", r" \1 "),
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\^\s*\{\s*([-+]?\d)\s*\}", r"^\1"),
        (r"\\mu(?![a-zA-Z])\s*(?=[a-zA-Z])", "μ"),
        (r"(?:(k)\s+)?\\Omega(?![a-zA-Z])", r"\1Ω"),
        (r"(?:\{\s*\})?\s*\^\\circ\s*", "°"),
        (r"\blight year", "lightyear"),
        (r"(?:°|\bdegrees?)\s*(?:C|[Cc]elsius)(?![a-zA-Z])", " °C "),
        (r"(?:°|\bdegrees?)\s*(?:F|[Ff]ahrenheit)(?![a-zA-Z])", " °F "),
        (r"\\(?:cdot|times)(?![a-zA-Z])|\*", " "),
        (r"(?<![a-zA-Z])per(?![a-zA-Z])", "/"),
        (r"(?i)\b(?:square|sq\.?) ([a-z]+)", r"\1^2"),
        (r"(?i)\b(?:cubic|cu\.?) ([a-z]+)", r"\1^3"),
        (r"(?i)(?<=[a-z]) squared\b|(?<=[a-z])2(?!\d)", "^2"),
        (r"(?i)(?<=[a-z]) cubed\b|(?<=[a-z])3(?!\d)", "^3"),
        (r"(?i)\bmph\b", "mph/h"),
        (r"(?i)\b(?:kph|kmh|kmph)\b", "kmph/h"),
        (r"\bfps\b", "ft/s"),
        (r"Wh\b", "W h"),
    )
]
_SPEEDS = {"mph": "mi", "kmph": "km"}
_FACTOR = re.compile(
    r"\s*(?P<per>/)?\s*(?P<name>°[CF]?|\\?\$|[€£¥₹¢]|[a-zA-ZμΩ]+(?:\.[a-zA-Z]+)*)\.?(?:\s*\^(?P<power>[-+]?\d))?"
)

# Words behind a number that change its value; others that withdraw it or belong to a date are no counted things either.
_CHANGING_WORDS = """
squared cubed factorial factorials subfactorial subfactorials over plus minus times divided multiplied by mod modulo
choose base basis root power raised exponent exponents exponential logarithm logarithms point dot decimal decimals comma
half halves third thirds quarter quarters dozen dozens score gross grosses grand grands myriad myriads lakh lakhs crore
crores mil mils mill mills mille milles bn mn tn bps bips ppm ppb ppt permille percentage percentages percents
percentile percentiles pct twice thrice double doubles triple quadruple fold reciprocal reciprocals inverse inverses
opposite opposites negatives conjugate conjugates complement complements binary octal hexadecimal percent thou mega giga
sin cos tan cot sec csc arcsin arccos arctan log ln lg exp sqrt gcd lcm pi infinity
"""
_OTHER_WORDS = """
and or nor to more less fewer greater than least most not no never none neither either maybe perhaps possibly is isn
are was be cannot if unless when except without but instead rather wrong incorrect false negative imaginary prime
equals does has have fails versus exactly roughly
january february march april may june july august september october november december
monday tuesday wednesday thursday friday saturday sunday bc bce ad ce
"""
_CHANGES = frozenset(_CHANGING_WORDS.split())
_NO_THINGS = _CHANGES.union(_OTHER_WORDS.split())
_NUMBER_WORD = re.compile(
    r"""(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|hundred|thousand|\w*illion
    |googol)(?:e?s|ths?)?|(?:twen|thir|for|four|fif|six|seven|eigh|nine)t(?:y|ies|ieths?)|(?:fif|eigh|nin|twelf)ths?
    |\w+(?:fold|uple|upled)""",
    re.VERBOSE,
)
# 5 doubled, 5 theta; but 5 beta testers
_CHANGING_END = re.compile(
    r"(?!\w*eed$)\w{3,}ed|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|omega"
)
_CHANGING_PHRASE = re.compile(r"\b(?:(?:square|cube) roots|per (?:cent|mille|mil)|orders of|basis points)\b")
# Behind a unit or a counted thing these begin a remark.
_REMARK_WORDS = """
per a an each every apiece of in for from at on with away apart long tall wide high deep thick old later ago
earlier left remaining total altogether overall together only
"""
_REMARKS = frozenset(_REMARK_WORDS.split())
_IRREGULAR = "people men women children mice geese teeth dice sheep fish police vertices toys pence"
_IRREGULAR_PLURALS = frozenset(_IRREGULAR.split())
_BEGIN = re.compile(
    r"(?:\{\s*\}\s*)?\^\\circ|\\(?:text|mu|Omega|\$|frac(?=\s*\{\s*\\text))(?![a-zA-Z])|(?<![a-zA-Z\\{μ])[a-zA-ZμΩ€£¥₹¢]"
)
_MAX_CHARACTERS = 60  # a search from every letter of a long text would be quadratic


def unit_starts(text: str) -> list[int]:
    """Where a unit may begin: at a letter or sign that is not inside a longer name."""
    return [match.start() for match in _BEGIN.finditer(text, max(0, len(text) - _MAX_CHARACTERS)) if match.start()]


def read_unit(words: str, *, spaced: bool, several: bool, behind_number: bool) -> str | None:
    """Return the unit behind a value, ``COUNTED``, ``UNNAMED``, or None if the words are none of these.

    Args:
        words: from the end of the value to the end of the answer.
        spaced: whether a blank separates them from the value, so that they cannot be a variable.
        several: whether the value is an integer other than 0, 1 and -1, so that counted things are plural.
        behind_number: whether the value is a number; behind an expression letters are more often variables.
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
    if len(over) > 1 and not _FACTORS.issuperset(over):
        return None  # 5 m dollars are millions
    rest = " ".join(text[end:].split()).strip(".")
    found = " ".join(sorted(unit if power == 1 else f"{unit}^{power}" for unit, power in exponents.items() if power))
    found = UNNAMED if UNNAMED in exponents else found
    if end and not rest:
        return found if upright or _is_plain_unit(found, names, spaced, behind_number) else None
    if not (behind_number and (upright or spaced)):
        return None
    if end and leaves_value(rest) and rest.split()[0] in _REMARKS:
        return found
    return _counted(" ".join(text.replace("/", " per ").split()), several)


def _unit(name: str, rest: str) -> str | None:
    name = name.removeprefix("\\")
    if name == "in" and re.match(r" [a-zA-Z]", rest):
        return None
    lower = name.lower()
    return _SPEEDS.get(lower) or _UNITS.get(name) or (_UNITS.get(lower) if len(name) > 1 else None)


def _is_plain_unit(unit: str, names: list[str], spaced: bool, behind_number: bool) -> bool:
    r"""Whether names outside of ``\text{}`` are a unit and not variables."""
    if not all(name.isascii() and name.isalpha() for name in names):
        return True  # Ω, €, p.m.
    if not behind_number:
        return spaced and all(len(name) > 1 and name != "in" for name in names)
    if not spaced:
        return names[0] in _JOINED or unit in ("m s^-1", "m s^-2")
    if not all(len(name) > 2 or name in _PLAIN_SYMBOLS for name in names):
        return False
    return any(len(name) > 1 for name in names) or unit in _COMPOUNDS or unit in _PLAIN_SYMBOLS


def changes_value(word: str) -> bool:
    """Whether a word behind a number makes it another one: 5 dozen, 5 fourths, 5 squared."""
    return word.lower() in _CHANGES or _NUMBER_WORD.fullmatch(word.lower()) is not None


def leaves_value(text: str) -> bool:
    """Whether words leave the value before them unchanged: no operation, denial, date, function or variable."""
    if re.fullmatch(r"[a-zA-Z][a-zA-Z .'-]*", text) is None or _CHANGING_PHRASE.search(text.lower()):
        return False
    words = text.replace(".", " ").replace("-", " ").split()
    if _CHANGING_END.fullmatch(words[-1].lower()):
        return False
    return not any(
        changes_value(word)
        or word.lower() in _NO_THINGS
        or (len(word) > 2 and word.lower() in string.ascii_lowercase)
        or (len(word) == 1 and (len(after) < 3 or word in "KMBG" or (word.islower() and word != "a")))
        or (len(word) == 2 and word.lower() not in _REMARKS and not _unit(word, ""))
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def _counted(text: str, several: bool) -> str | None:
    """``COUNTED`` for things (``red apples``), ``UNNAMED`` for ``in total`` or ``a day``, else None."""
    if not leaves_value(text):
        return None
    words = text.lower().replace("-", " ").split()
    things = words[: next((place for place, word in enumerate(words) if word in _REMARKS), len(words))]
    if not things:
        return UNNAMED if len(words) > 1 or len(words[0]) > 2 else None
    plural = len(things[-1]) > 3 and things[-1].endswith("s") and not things[-1].endswith(("ss", "us", "is"))
    return COUNTED if not several or plural or things[-1] in _IRREGULAR_PLURALS else None


def same_unit(first: str | None, second: str | None) -> bool:
    """Whether two units agree; a missing unit agrees with any."""
    if None in (first, second) or UNNAMED in (first, second) or first == second or {first, second} in _ALIASES:
        return True
    # $3 for $3 an hour, but not for $3 a minute.
    shorter, longer = sorted((str(first).split(), str(second).split()), key=len)
    return len(shorter) == 1 and shorter[0] in _MONEY and longer[:1] == shorter


def currency(sign: str) -> str:
    name = sign.strip().removeprefix("\\").removesuffix(".")
    return _UNITS.get(name) or _UNITS[{"rs": "Rs"}.get(name.lower(), name.upper())]
