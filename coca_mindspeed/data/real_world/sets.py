"""The sets for a run: what the format is taught on, what is trained on, and what is held out or never trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.data.prepare.output import check_output_path, output_directory
from coca_mindspeed.data.real_world import matter_and_words, places, sums
from coca_mindspeed.data.real_world.question_families import Family, Part
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import MissingDependencyError

FAMILIES = (
    Family("capitals", "trained", "factual", places.capitals),
    Family("cities", "trained", "factual", places.cities),
    Family("languages", "trained", "factual", matter_and_words.languages),
    Family("additions", "trained", "math", sums.additions),
    Family("differences", "trained", "math", sums.differences),
    Family("letters", "warm_up", "factual", matter_and_words.letters),
    Family("neighbours", "warm_up", "factual", matter_and_words.neighbours),
    Family("products", "near", "math", sums.products),
    Family("continents", "near", "factual", places.continents),
    Family("capital_of", "near", "factual", places.capital_of),
    Family("domains", "near", "factual", places.domains),
    Family("symbols", "far", "factual", matter_and_words.symbols),
    Family("elements", "far", "factual", matter_and_words.elements),
    Family("currencies", "far", "factual", places.currencies_of_countries),
    Family("currency_codes", "far", "factual", matter_and_words.currency_codes),
)


@dataclass(frozen=True)
class Sizes:
    """The most records of a family in each part, of which many families have fewer, and how difficult they may be."""

    train: int = 600
    evaluate: int = 150
    warm_up: int = 80
    hardest: float = 1.0


def real_world_records(part: Part, size: int, seed: int = 0, hardest: float = 1.0) -> list[Record]:
    """Records of one part, family after family.

    Args:
        part: ``train``, ``warm_up`` or ``evaluate``; no entity that the last asks about is in the others.
        size: the most of each family.
        seed: draws which questions and their order; what is held out depends on no seed.
        hardest: the greatest difficulty, from 0 to 1, of the trained families' questions.

    Raises:
        MissingDependencyError: a package with data is not installed.
    """
    try:
        return [record for family in FAMILIES for record in family.records(part, size, seed, hardest)]
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the package {error.name} has the data, and is not installed: pip install '.[real-world]'"
        ) from error


def write_real_world(output: Path, sizes: Sizes, seed: int, *, overwrite: bool = False) -> dict[str, int]:
    """Write ``warm_up.jsonl``, ``train.jsonl`` and ``evaluate.jsonl``, whole or not at all; returns their sizes.

    Raises:
        DataError: the output's place is taken.
        MissingDependencyError: a package with data is not installed.
    """
    check_output_path(output, overwrite)
    written = {}
    with output_directory(output, overwrite) as directory:
        for part, records in real_world_sets(sizes, seed):
            write_records(directory / f"{part}.jsonl", records)
            written[f"{part}.jsonl"] = len(records)
    return written


def real_world_sets(sizes: Sizes, seed: int = 0) -> Iterator[tuple[Part, list[Record]]]:
    """The three sets, the evaluation's last."""
    parts: tuple[tuple[Part, int], ...] = (
        ("warm_up", sizes.warm_up),
        ("train", sizes.train),
        ("evaluate", sizes.evaluate),
    )
    for part, size in parts:
        yield part, real_world_records(part, size, seed, sizes.hardest)
