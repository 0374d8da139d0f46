r"""Read the words behind a value: a unit, counted things, or words that change the value.

All spellings of a unit have one name: ``9.8 m/s^2`` is ``9.8\,m\,s^{-2}``; ``12 cm`` is not ``12 m``. Nothing is
converted.
"""

import re
import string

#: Counted things (``12 apples``), and words that name neither a unit nor things (``in total``).
COUNTED, UNNAMED = "", "unit"

# The first name is the canonical one. Those of the first table take prefixes.
_PREFIXES = {"n": "nano", "μ": "micro", "m": "milli", "c": "centi", "d": "deci", "k": "kilo", "M": "mega", "G": "giga"}
_WITH_PREFIXES = """
m meter metre; g gram gramme; s second; L liter litre; N newton; J joule; W watt; V volt; A ampere amp; C coulomb
F farad; T tesla; Pa pascal; Hz hertz; Ω ohm; mol mole; eV electronvolt; cal calorie; B byte; Wh
"""
_OTHERS = """
in inch inches; ft foot feet; yd yard yards; mi mile miles; lb lbs pound pounds; oz ounce ounces
kg kilo kilos kgs; cm cms; km kms; mm mms; g gm gms; L l; mL ml mls; ton tons tonne tonnes; s sec secs
min mins minute minutes; h hr hrs hour hours; day days; week weeks; month months; year years yr yrs
decade decades; century centuries; pint pints pt; quart quarts qt; gallon gallons gal; cup cups
tablespoon tablespoons tbsp; teaspoon teaspoons tsp; acre acres; hectare hectares ha; lightyear lightyears
K kelvin kelvins; celsius; fahrenheit; degree degrees deg °; radian radians rad; atm; dB
dollar dollars bucks USD usd $; cent cents ¢; euro euros EUR €; rupee rupees Rs INR ₹; yuan RMB CNY; yen JPY; GBP £; ¥
am a.m AM A.M; pm p.m PM P.M; unit units
"""
_QUOTIENTS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "kmph": ("km", "h"), "fps": ("ft", "s")}
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
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
                names[prefix + symbol] = prefix + symbol
                for word in words:
                    names |= {long_prefix + word: prefix + symbol, f"{long_prefix}{word}s": prefix + symbol}
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
_SINGLE_LETTERS = {(_UNITS[symbol], 1) for symbol in _PLAIN_SYMBOLS if len(symbol) == 1} | {("m", 2), ("m", 3)}
# Units of several single letters; others, like m/g, may be variables.
_COMPOUNDS = frozenset(
    " ".join(entry)
    for entry in _entries("m s^-1; m s^-2; m^2 s^-1; m^3 s^-1; h^-1 m; L s^-1; L h^-1; L^-1 g; N m; N s; J s; A h; W h")
)
# Units even without a blank: 12cm, but not 12m.
_JOINED_NAMES = "cm mm km kg mg ml mL ft lb lbs oz mph kmph min hr Hz kHz kPa kWh mol am pm AM PM a.m p.m"
_JOINED = frozenset(_JOINED_NAMES.split())

_PIECE = re.compile(
    r"""\s*(?:
        \^(?P<power>[-+]?\d) | (?<=[a-z])(?P<digit>[23])(?!\d)
      | (?P<times>\\(?:cdot|times)(?![a-zA-Z])|\*)
      | (?P<per>/|per(?![a-zA-Z]))
      | (?P<word>°|\\?\$|[€£¥₹¢]|[a-zA-ZμΩ]+(?:\.[a-zA-Z]+)*\.?)
    )""",
    re.VERBOSE,
)
_SCALE_OF_DEGREES = re.compile(r"\s*(?:(C(?:elsius)?|celsius)|F(?:ahrenheit)?|fahrenheit)(?![a-zA-Z])")

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
per a an each every apiece of in for from at on with away apart long tall wide high deep thick old later ago earlier
left remaining total altogether overall together only
"""
_REMARKS = frozenset(_REMARK_WORDS.split())
_IRREGULAR = """
people men women children mice geese teeth oxen dice sheep fish deer police cattle salmon shrimp aircraft toys
data criteria vertices radii pence candy
"""
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
    upright = r"\text" in words
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", words))
    text = re.sub(r"\^\s*\{\s*([-+]?\d)\s*\}", r"^\1", text).replace(r"\mu", "μ").replace(r"\Omega", "Ω")
    text = re.sub(r"(?<=μ) +(?=[a-zA-Z])|(?<=k) +(?=Ω)", "", text.replace(r"^\circ", "°"))
    text = " ".join(re.sub(r"\blight years?\b", "lightyear", text).split())
    exponents, names, end = _leading_unit(text)
    over = [unit for unit, power in exponents.items() if power > 0]
    if len(over) > 1 and not _FACTORS.issuperset(over):
        return None  # 5 m dollars are millions
    rest = text[end:].strip()
    if end and not rest:
        return _named(exponents) if upright or _is_plain_unit(exponents, names, spaced, behind_number) else None
    if not (behind_number and (upright or spaced)):
        return None
    if end and leaves_value(rest) and rest.split()[0] in _REMARKS:
        return _named(exponents)
    return _counted(text, several)


def _leading_unit(text: str) -> tuple[dict[str, int], list[str], int]:
    """Exponents of the units at the start of a text, their names in the text, and where they end."""
    exponents: dict[str, int] = {}
    names: list[str] = []
    last: tuple[tuple[str, int], ...] = ()
    end = place = 0
    sign = power = 1
    while match := _PIECE.match(text, place):
        place = match.end()
        word = (match["word"] or "").rstrip(".")
        if match["times"]:
            continue
        if match["per"]:
            sign = -1
            continue
        if raised := match["power"] or match["digit"] or (word.lower() in ("squared", "cubed") and word.lower()):
            if not last:
                break
            for unit, factor in last:
                exponents[unit] += factor * (_POWER_WORDS.get(raised) or int(raised)) - factor
        elif word.lower() in _POWER_WORDS:
            power = _POWER_WORDS[word.lower()]
            continue
        elif (word == "in" and re.match(r" [a-zA-Z]", text[place:])) or not (units := _lookup(word.removeprefix("\\"))):
            break
        else:
            if units == (("degree", 1),) and (scale := _SCALE_OF_DEGREES.match(text, place)):
                units, place = (("celsius" if scale[1] else "fahrenheit", 1),), scale.end()
            last = tuple((unit, factor * sign * power) for unit, factor in units)
            for unit, factor in last:
                exponents[unit] = exponents.get(unit, 0) + factor
            names.append(word)
            sign = power = 1
        end = place
    return exponents, names, end


def _lookup(name: str) -> tuple[tuple[str, int], ...]:
    if name.lower() in _QUOTIENTS:
        over, under = _QUOTIENTS[name.lower()]
        return (over, 1), (under, -1)
    unit = _UNITS.get(name) or (_UNITS.get(name.lower()) if len(name) > 1 else None)
    if unit is not None and unit.endswith("Wh"):
        return (unit[:-1], 1), ("h", 1)
    return () if unit is None else ((unit, 1),)


def _named(exponents: dict[str, int]) -> str:
    """One name for a product of powers of units: ``m s^-2``."""
    if UNNAMED in exponents:
        return UNNAMED
    return " ".join(sorted(unit if power == 1 else f"{unit}^{power}" for unit, power in exponents.items() if power))


def _is_plain_unit(exponents: dict[str, int], names: list[str], spaced: bool, behind_number: bool) -> bool:
    r"""Whether names outside of ``\text{}`` are a unit and not variables."""
    if not all(name.isascii() and name.isalpha() for name in names):
        return True  # Ω, €, p.m.
    if not behind_number:
        return spaced and all(len(name) > 1 and name != "in" for name in names)
    if not spaced:
        return names[0] in _JOINED or _named(exponents) in ("m s^-1", "m s^-2")
    if not all(len(name) > 2 or name in _PLAIN_SYMBOLS for name in names):
        return False
    if any(len(name) > 1 for name in names):
        return True
    return _named(exponents) in _COMPOUNDS or (len(names) == 1 and set(exponents.items()) <= _SINGLE_LETTERS)


def changes_value(word: str) -> bool:
    """Whether a word behind a number makes it another one: 5 dozen, 5 fourths, 5 squared."""
    return word.lower() in _CHANGES or _NUMBER_WORD.fullmatch(word.lower()) is not None


def leaves_value(text: str) -> bool:
    """Whether words leave the value before them unchanged: no operation, denial, date, function or variable."""
    if re.fullmatch(r"[a-zA-Z][a-zA-Z .'-]*", text) is None or _CHANGING_PHRASE.search(text.lower()):
        return False
    words = text.replace(".", " ").replace("-", " ").split()
    if any(changes_value(word) or word.lower() in _NO_THINGS for word in words):
        return False
    if _CHANGING_END.fullmatch(words[-1].lower()):
        return False
    return not any(
        (len(word) > 2 and word.lower() in string.ascii_lowercase)
        or (len(word) == 1 and (len(after) < 3 or word in "KMBG" or (word.islower() and word != "a")))
        or (len(word) == 2 and word.lower() not in _REMARKS and not _lookup(word))
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def _counted(text: str, several: bool) -> str | None:
    """``COUNTED`` for things (``red apples``), ``UNNAMED`` for ``in total`` or ``a day``, else None."""
    text = text.replace("/", " per ")
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
    if first is None or second is None or UNNAMED in (first, second) or first == second:
        return True
    if frozenset((first, second)) in _ALIASES:
        return True
    # $3 for $3 an hour, but not for $3 a minute.
    shorter, longer = sorted((first.split(), second.split()), key=len)
    return len(shorter) == 1 and shorter[0] in _MONEY and longer[:1] == shorter


def currency(sign: str) -> str:
    name = sign.strip().removeprefix("\\").removesuffix(".")
    return _UNITS.get(name) or _UNITS[{"rs": "Rs"}.get(name.lower(), name.upper())]
