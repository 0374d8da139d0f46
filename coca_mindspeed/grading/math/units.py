r"""Read the words after a number: a unit, counted things, or words that change the value.

All spellings of a unit have one name: ``9.8 m/s^2`` is ``9.8\,m\,s^{-2}``; ``12 cm`` is not ``12 m``.
"""

import re
import string

from coca_mindspeed.grading.math.spelling import TEXT

#: Counted things (``12 apples``); words that name neither a unit nor things (``12 units``).
COUNTED, UNNAMED = "", "unit"

# Symbol and long names, which take prefixes. In the other tables the first name is the canonical one.
_PREFIXES = {"n": "nano", "μ": "micro", "m": "milli", "k": "kilo", "M": "mega", "G": "giga", "T": "tera"}
_SMALL_PREFIXES = {"c": "centi", "d": "deci"}
_WITH_PREFIXES = """
m meter metre; g gram gramme; s second; L liter litre; N newton; J joule; W watt; V volt; A ampere amp; C coulomb
F farad; H henry; T tesla; Pa pascal; Hz hertz; Ω ohm; mol mole mol; eV electronvolt; cal calorie; B byte; Wh watthour
Ah amperehour; Bq becquerel; Gy gray; Sv sievert; lx lux; bar
"""
_WITHOUT_PREFIXES = """
in inch inches; ft foot feet; yd yard yards; mi mile miles; lb lbs pound pounds; oz ounce ounces; stone
kg kilo kilos kgs; cm cms; km kms; mm mms; g gm gms; L l; mL ml mls; ton tons tonne tonnes; s sec secs
min mins minute minutes; h hr hrs hour hours; day days; week weeks; fortnight fortnights; month months
year years yr yrs; decade decades; century centuries; millennium millennia
pint pints pt; quart quarts qt; gallon gallons gal; cup cups
tablespoon tablespoons tbsp; teaspoon teaspoons tsp; acre acres; hectare hectares ha; lightyear lightyears; knot knots
furlong furlongs; K kelvin kelvins; celsius; fahrenheit; hp horsepower; degree degrees deg °; radian radians rad
gradian gradians; revolution revolutions rev; atm atmosphere atmospheres; mmHg; torr; psi; dB decibel decibels
Å angstrom angstroms; bit bits; dollar dollars bucks USD usd $; cent cents ¢; euro euros EUR €; rupee rupees Rs INR ₹
yuan RMB CNY; yen JPY; GBP £; ¥; am a.m AM A.M; pm p.m PM P.M; unit units
"""
_CHINESE = """
m 米; cm 厘米; mm 毫米; dm 分米; km 千米 公里; g 克; kg 千克 公斤; mg 毫克; ton 吨; s 秒; min 分钟; h 小时 时; day 天 日
week 周 星期; month 月 个月; year 年; L 升; mL 毫升; yuan 元 人民币; jiao 角; dollar 美元; euro 欧元; yen 日元; GBP 英镑
degree 度; celsius 摄氏度; fahrenheit 华氏度; radian 弧度; N 牛 牛顿; J 焦 焦耳; W 瓦 瓦特; kW 千瓦; V 伏 伏特
A 安 安培; Ω 欧 欧姆; Pa 帕 帕斯卡; Hz 赫兹; kWh 千瓦时; hectare 公顷
"""
_QUOTIENTS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "kmph": ("km", "h"), "fps": ("ft", "s")}
_LONG_NAMES = re.compile(r"\b(light|watt|ampere|electron)[ -](years?|hours?|volts?)\b", re.IGNORECASE)
_SCALE_OF_DEGREES = re.compile(r"\s*(?:(C(?:elsius)?|celsius)|F(?:ahrenheit)?|fahrenheit)(?![a-zA-Z])")
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_CHINESE_POWERS = {"平方": 2, "立方": 3}
_CURRENCIES = {"\\$": "dollar", "usd": "dollar", "eur": "euro", "gbp": "GBP", "rs": "rupee"}
# Pairs of names that may mean the same unit.
_ALIASES = frozenset(
    map(frozenset, (("celsius", "degree"), ("fahrenheit", "degree"), ("celsius", "C"), ("fahrenheit", "F"),
                    ("¥", "yuan"), ("¥", "yen"), ("GBP", "lb")))
)  # fmt: skip


def _entries(table: str) -> list[list[str]]:
    return [entry.split() for entry in table.strip().replace("\n", ";").split(";")]


def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for symbol, *words in _entries(_WITH_PREFIXES):
        prefixes = _PREFIXES | (_SMALL_PREFIXES if symbol in ("m", "g", "L") else {})
        for prefix, long_prefix in {"": "", **prefixes}.items():
            names[prefix + symbol] = prefix + symbol
            for word in words:
                names |= {long_prefix + word: prefix + symbol, f"{long_prefix}{word}s": prefix + symbol}
    for canonical, *others in _entries(_WITHOUT_PREFIXES) + _entries(_CHINESE):
        names |= dict.fromkeys((canonical, *others), canonical)
    return names


_UNITS = _names()

# Units that have products with each other.
_FACTORS = frozenset(
    {prefix + symbol for symbol, *_ in _entries(_WITH_PREFIXES) for prefix in ("", *_PREFIXES, *_SMALL_PREFIXES)}
    | {"K", "h", "min", "ft", "lb"}
)

# After a number and a blank, letters outside of \text{} may be variables. These are units, like all longer names.
_SYMBOLS = """
m g s h l L N J V W K A cm mm km nm dm kg mg ms ns mL ml cL dL kN kJ MJ kW MW GW mW kV mV mA Hz Pa eV kB MB GB TB lb oz
ft yd mi hr yr am pm AM PM in Rs Wh Ah ha dB hp pt qt CM KM KG ML FT LB IN HR Km Kg Cm
"""
_PLAIN_SYMBOLS = frozenset(_SYMBOLS.split())
_SINGLE_LETTERS = {(_UNITS[symbol], 1) for symbol in _PLAIN_SYMBOLS if len(symbol) == 1} | {("m", 2), ("m", 3)}
# Units of several single letters; others, like m/g, may be variables.
_COMPOUNDS = """
m s^-1; m s^-2; m^2 s^-1; m^3 s^-1; h^-1 m; L s^-1; L h^-1; L^-1 g; N m; N m^-1; N m^-2; N s; C^-1 N; V m^-1; J K^-1
J s^-1; J s; C^-1 J; A V; A^-1 V; W m^-2; K^-1 W; A h; A s; W h; J K^-1 g^-1
"""
_PLAIN_COMPOUNDS = frozenset(" ".join(entry) for entry in _entries(_COMPOUNDS))
# Units even without a blank: 12cm, but not 12m.
_SAFE = "cm mm km kg mg ml mL ft lb lbs oz mph min hr Hz kHz MHz GHz kPa MPa kWh mol am pm AM PM a.m p.m A.M P.M"
_SAFE_WITHOUT_SPACE = frozenset(_SAFE.split())

_DEGREE_SIGN = re.compile(
    r"(?:\{\s*\}\s*)?\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ(?![a-zA-Z])\s*([CF]?)\s*\})|\\degree(?![a-zA-Z])"
)
_POWER = re.compile(r"\s*\^\s*(?:\{\s*([-+]?\d)\s*\}|([-+]?\d))")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_GREEK_SIGNS = ((re.compile(r"(?:\\mu(?![a-zA-Z])|μ)\s*"), "μ"), (re.compile(r"\\Omega(?![a-zA-Z])"), "Ω"))
_PREFIXED_OHM = re.compile(r"(?<![a-zA-Z])([kMm])\s+Ω")
_PIECE = re.compile(
    r"""\s*(?:
        \^(?P<power>[-+]?\d) | (?<=[a-z])(?P<digit>[23])(?!\d)
      | (?P<times>\\(?:cdot|times)(?![a-zA-Z])|[*⋅·])
      | (?P<per>/|per(?![a-zA-Z])|每)
      | (?P<open>\() | (?P<close>\))
      | (?P<chinese>(?:(?!每)[\u4e00-\u9fff])+)
      | (?P<word>°|\\?\$|[€£¥₹¢]|[a-zA-ZμΩÅ]+(?:\.[a-zA-Z]+)*\.?)
    )""",
    re.VERBOSE,
)

# Words after a number that change its value, withdraw it or belong to a date: neither units nor counted things.
_OPERATIONS = """
squared cubed factorial factorials subfactorial subfactorials primorial primorials over plus minus times divided
multiplied by mod modulo choose base basis root power raised exponent exponents exponential exponentials logarithm
logarithms point dot decimal decimals comma half halves third thirds quarter quarters dozen dozens score gross grosses
grand grands myriad myriads lakh lakhs lac lacs crore crores mil mils mill mills mille milles bn mn tn bps bips bip pip
pips ppm ppb ppt permille permil permilles promille percentage percentages percents percentile percentiles pct twice
thrice double doubles triple quadruple fold reciprocal reciprocals inverse inverses opposite opposites negatives
conjugate conjugates complement complements binary octal hex hexadecimal percent
"""
_SENTENCES = """
and or nor to more less fewer greater than least most not no never none neither either maybe perhaps possibly is isn
are was be cannot if unless when except without but instead rather wrong incorrect false negative imaginary prime
equals does has have fails versus
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
# Functions and pi are factors; so are Greek letters, except in names (beta testers).
_FUNCTIONS = re.compile(
    r"a?(?:sin|cos|tan|cot|sec|csc)h?|arc(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|gcd|lcm|pi|infinity|infty"
)
_GREEK = re.compile(r"alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|omega")
_CHANGING_PHRASE = re.compile(r"\b(?:square|cube) roots\b|\bper (?:cent|mille|mil)\b|\borders of\b")
# Millions and the like: "5 K people".
_SHORT_SCALES = frozenset("KMBG")
# "5 doubled", "5 inverted".
_PARTICIPLE = re.compile(r"(?!\w*eed$)\w{3,}ed")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z .'-]*")
# After a unit or a counted thing these begin a remark.
_LINK_WORDS = """
per a an each every apiece of in for from at on with away apart long tall wide high deep thick old later ago earlier
left remaining total altogether overall together only
"""
_LINKS = frozenset(_LINK_WORDS.split())
# Counted things are plural, words of scale are not: 5 apples, but not 5 grand.
_IRREGULAR = """
people men women children mice geese teeth oxen dice sheep fish deer police cattle salmon trout shrimp aircraft pcs pts
toys data criteria vertices radii foci loci nuclei cacti fungi alumni bacteria maxima minima extrema formulae pence
"""
_PLURALS = frozenset(_IRREGULAR.split())
_CHINESE_COUNTERS = (
    "个只人名位条张本支枝棵朵头匹辆架艘间座栋层块片件套副瓶杯碗盘袋箱包盒桶"
    "颗粒根把台次种类组排行列页题道点步圈场局轮届倍岁分"
)
_CHINESE_CHANGES = frozenset("十百千万亿半零不非约余多数分之")


def read_unit(words: str, *, spaced: bool, several: bool, behind_number: bool) -> str | None:
    """Return the unit after a value, ``COUNTED``, ``UNNAMED``, or None if the words are none of these.

    Args:
        words: LaTeX from the end of the value to the end of the answer.
        spaced: whether a blank separates them from the value, so that they cannot be a variable.
        several: whether the value is an integer other than 0, 1 and -1, so that counted things are plural.
        behind_number: whether the value is a number; after an expression letters are more often variables.
    """
    text = _flat(words)
    upright = re.match(r".*\\(?:text|math|mbox|rm|operatorname)", words) is not None
    exponents, names, end = _leading_unit(text)
    over = [unit for unit, power in exponents.items() if power > 0]
    if len(over) > 1 and not _FACTORS.issuperset(over):
        return None  # 5 m dollars are millions
    rest = text[end:].strip()
    if end and not rest:
        return _named(exponents) if upright or _is_plain_unit(exponents, names, spaced, behind_number) else None
    if not upright and not behind_number:
        return None
    if re.fullmatch(r"[\u4e00-\u9fff]+", text):
        return COUNTED if text[0] in _CHINESE_COUNTERS and _CHINESE_CHANGES.isdisjoint(text[1:]) else None
    if not (upright or spaced):
        return None
    if end and leaves_value(rest) and rest.split()[0] in _LINKS:
        return _named(exponents)
    return _counted(text, several)


def _flat(words: str) -> str:
    r"""The words without ``\text{}``; powers, fractions and signs in one spelling each."""
    text = _POWER.sub(lambda match: f"^{match[1] or match[2]}", words)
    text = re.sub(TEXT, r" \1 ", text)
    text = _DEGREE_SIGN.sub(lambda match: "°" + (match[1] or ""), text)
    for sign, letter in _GREEK_SIGNS:
        text = sign.sub(letter, text)
    text = _FRACTION.sub(r"(\1)/(\2)", _PREFIXED_OHM.sub(r"\1Ω", text))
    return " ".join(_LONG_NAMES.sub(r"\1\2", text).split())


def _leading_unit(text: str) -> tuple[dict[str, int], list[str], int]:
    """Exponents of the units at the start of a text, their names in the text, and where they end."""
    exponents: dict[str, int] = {}
    names: list[str] = []
    last: tuple[tuple[str, int], ...] = ()
    place = end = 0
    sign = group = power = 1
    groups: list[int] = []
    while match := _PIECE.match(text, place):
        place = match.end()
        word = (match["word"] or "").rstrip(".")
        if match["times"]:
            continue
        if match["per"]:
            sign = -1
            continue
        if match["open"]:
            groups.append(group)
            group, sign = group * sign, 1
            continue
        if match["close"]:
            if not groups:
                break
            group = groups.pop()
        elif raised := match["power"] or match["digit"] or (word.lower() in ("squared", "cubed") and word.lower()):
            if not last:
                break
            times = _POWER_WORDS.get(raised) or int(raised)
            for unit, factor in last:
                exponents[unit] += factor * (times - 1)
        elif word.lower() in _POWER_WORDS:
            power = _POWER_WORDS[word.lower()]
            continue
        else:
            if word == "in" and re.match(r" [a-zA-Z]", text[place:]):
                break  # in a row
            name = match["chinese"] or word.removeprefix("\\")
            if name[:2] in _CHINESE_POWERS and len(name) > 2:
                name, power = name[2:], _CHINESE_POWERS[name[:2]]
            if not (units := _lookup(name)):
                break
            if units == (("degree", 1),) and (scale := _SCALE_OF_DEGREES.match(text, place)):
                units, place = (("celsius" if scale[1] else "fahrenheit", 1),), scale.end()
            last = tuple((unit, factor * sign * group * power) for unit, factor in units)
            for unit, factor in last:
                exponents[unit] = exponents.get(unit, 0) + factor
            names.append(name)
            sign = power = 1
        if not groups:
            end = place
    return exponents, names, end


def _lookup(name: str) -> tuple[tuple[str, int], ...]:
    if name.lower() in _QUOTIENTS:
        over, under = _QUOTIENTS[name.lower()]
        return (over, 1), (under, -1)
    unit = _UNITS.get(name) or (_UNITS.get(name.lower()) if len(name) > 1 else None)
    if unit is not None and unit[-2:] in ("Wh", "Ah"):
        return (unit[:-1], 1), ("h", 1)
    if name in ("Nm", "kNm"):
        return (name[:-1], 1), ("m", 1)
    return ((unit, 1),) if unit else ()


def _named(exponents: dict[str, int]) -> str:
    """One name for a product of powers of units: ``m s^-2``."""
    if UNNAMED in exponents:
        return UNNAMED
    return " ".join(sorted(unit if power == 1 else f"{unit}^{power}" for unit, power in exponents.items() if power))


def _is_plain_unit(exponents: dict[str, int], names: list[str], spaced: bool, behind_number: bool) -> bool:
    r"""Whether names outside of ``\text{}`` are a unit and not variables."""
    if not all(name.isascii() and name.isalpha() for name in names):
        return True  # Ω, €, 元, p.m.
    if not behind_number:
        return spaced and all(len(name) > 1 and name != "in" for name in names)
    if not spaced:
        return names[0] in _SAFE_WITHOUT_SPACE or _named(exponents) in ("m s^-1", "m s^-2")
    if not all(len(name) > 2 or name in _PLAIN_SYMBOLS for name in names):
        return False
    if any(len(name) > 1 for name in names):
        return True
    return _named(exponents) in _PLAIN_COMPOUNDS or (len(names) == 1 and set(exponents.items()) <= _SINGLE_LETTERS)


def leaves_value(text: str) -> bool:
    """Whether words leave the value before them unchanged: no operation, denial, date, function or variable."""
    if _WORDS.fullmatch(text) is None:
        return False
    words = text.replace(".", " ").replace("-", " ").split()
    lower = [word.lower() for word in words]
    if _CHANGING_PHRASE.search(text.lower()):
        return False
    if any(word in _NOT_UNITS or _NUMBER_WORD.fullmatch(word) or _FUNCTIONS.fullmatch(word) for word in lower):
        return False
    return not (_PARTICIPLE.fullmatch(lower[-1]) or _GREEK.fullmatch(lower[-1]) or _holds_variables(words))


def _holds_variables(words: list[str]) -> bool:
    """Whether words contain letters that are not units: ``xyz``, ``x y``, but not ``T shirts`` or ``a ticket``."""
    return any(
        (len(word) > 2 and word.lower() in string.ascii_lowercase)
        or (len(word) == 1 and (len(after) < 3 or word in _SHORT_SCALES or (word.islower() and word != "a")))
        or (len(word) == 2 and word.lower() not in _LINKS and not _lookup(word))
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def _counted(text: str, several: bool) -> str | None:
    """``COUNTED`` for things (``red apples``), ``UNNAMED`` for ``in total`` or ``a day``, else None."""
    text = text.replace("/", " per ")
    if not leaves_value(text):
        return None
    words = text.lower().replace("-", " ").split()
    things = words[: next((place for place, word in enumerate(words) if word in _LINKS), len(words))]
    if not things:
        return UNNAMED if len(words) > 1 or len(words[0]) > 2 else None
    return COUNTED if not several or _is_plural(things[-1]) else None


def _is_plural(word: str) -> bool:
    return word in _PLURALS or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def same_unit(first: str | None, second: str | None) -> bool:
    """Whether two units agree; a missing unit agrees with any. Nothing is converted."""
    if first is None or second is None or UNNAMED in (first, second) or first == second:
        return True
    if frozenset((first, second)) in _ALIASES:
        return True
    # $3 for $3 an hour, but not for $3 a minute.
    shorter, longer = sorted((first.split(), second.split()), key=len)
    return len(shorter) == 1 and shorter[0] in _RATED and longer[:1] == shorter


_RATED = frozenset(("dollar", "cent", "euro", "GBP", "rupee", "yuan", "yen"))


def currency_unit(symbol: str) -> str:
    symbol = symbol.lower().removesuffix(".")
    return _CURRENCIES.get(symbol) or _UNITS.get(symbol, symbol)
