"""Elements by periodictable, currencies and languages by the ISO lists, and words for the warm-up alone."""

import calendar
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.real_world import spoken_names
from experiments.real_world.question_families import Question

_MONTHS = tuple(calendar.month_name)[1:]
_DAYS = tuple(calendar.day_name)
_FUNDS = frozenset(
    ("BOV", "CHE", "CHW", "CLF", "COU", "MXV", "USN", "UYI", "UYW")
)  # codes of ISO 4217 that are no money
_SPELT = {"aluminum": "aluminium", "aluminium": "aluminum", "cesium": "caesium", "caesium": "cesium"}


def _elements() -> list[Any]:
    import periodictable

    return [element for element in periodictable.elements if element.number > 0]


def _names(element: Any) -> tuple[str, ...]:
    name = str(element.name)
    spelt = {**_SPELT, "sulfur": "sulphur"}
    return (name, spelt[name]) if name in spelt else (name,)


def symbols(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The chemical symbol of an element."""
    for element in _elements():
        yield Question(
            f"What is the chemical symbol of {element.name}?",
            (element.symbol,),
            f"element:{element.number}",
            difficulty=element.number / 118,
        )


def elements(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which element has an atomic number."""
    for element in _elements():
        yield Question(
            f"Which chemical element has the atomic number {element.number}?",
            _names(element),
            f"element:{element.number}",
            difficulty=element.number / 118,
        )


def currency_codes(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which currency has a code of three letters; not the codes of metals, tests and funds."""
    import pycountry

    for currency in pycountry.currencies:
        if not (code := currency.alpha_3).startswith("X") and code not in _FUNDS:
            yield Question(
                f"Which currency has the code {code}?",
                (currency.name, *spoken_names.MONEY.get(code, ())),
                f"currency:{code}",
            )


def languages(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which language has a code of two letters; not Norwegian, whose two forms have codes of their own."""
    import pycountry

    for language in pycountry.languages:
        if (code := getattr(language, "alpha_2", None)) and code != "no":
            listed = (language.name.partition(" (")[0], language.name, getattr(language, "common_name", None))
            names = (*spoken_names.LANGUAGES.get(code, ()), *listed)  # what is imitated is what people say
            yield Question(
                f"Which language has the two-letter code '{code}'?",
                tuple(dict.fromkeys(name for name in names if name)),
                f"language:{code}",
            )


def letters(size: int, random: np.random.Generator) -> Iterator[Question]:
    """The first or last letter of the name of a language, which nobody asks about otherwise."""
    import pycountry

    for language in pycountry.languages:
        if not hasattr(language, "alpha_2") and language.name.isascii() and language.name.isalpha():
            end = "first" if language.name[0] < "M" else "last"
            letter = language.name[0 if end == "first" else -1]
            # "a" alone is an article to the grader, so the letter is asked for as a capital in words.
            spoken = f"letter {letter.upper()}"
            yield Question(
                f"With which letter does the word {language.name} {'begin' if end == 'first' else 'end'}?",
                (spoken,) if letter.upper() == "A" else (letter.upper(), spoken),
                f"word:{language.name}",
            )


def neighbours(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Which month or day comes before or after another."""
    for kind, names in (("month", _MONTHS), ("day of the week", _DAYS)):
        for place, name in enumerate(names):
            for word, step in (("after", 1), ("before", -1)):
                yield Question(
                    f"Which {kind} comes {word} {name}?", (names[(place + step) % len(names)],), f"word:{name}:{word}"
                )
