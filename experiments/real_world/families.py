"""Families of questions, the roles that they have, and the record files for a run."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.utils.directories import check_output_path, output_directory
from experiments.real_world import questions
from experiments.real_world.questions import Question

Role = Literal["trained", "warm_up", "near", "far"]
Part = Literal["evaluate", "warm_up", "train"]
HELD_OUT, WARMED_UP = 0.3, 0.15  # shares of the entities
_PARTS: dict[Role, Sequence[Part]] = {
    "trained": ("train", "warm_up", "evaluate"),
    "warm_up": ("warm_up",),
    "near": ("evaluate",),
    "far": ("evaluate",),
}
#: Kinds of entities that no record of training or of the warm-up mentions.
NEVER_TAUGHT = frozenset(("element", "currency", "product"))


@dataclass(frozen=True)
class Family:
    """Questions of one kind.

    Attributes:
        name: the records' data set.
        role: ``trained``; ``warm_up``: SFT warm-up only; ``near`` and ``far``: evaluation only, similar to a trained
            family or not.
        category: of the records.
        questions: all questions, or draws for this many records.
        share: of the size of a part.
        graded: whether a greatest difficulty applies; the others go from well known to obscure on purpose.
    """

    name: str
    role: Role
    category: str
    questions: Callable[[int, np.random.Generator], Iterable[Question]]
    share: float = 1.0
    graded: bool = True

    def records(self, part: Part, size: int, seed: int, hardest: float = 1.0) -> list[Record]:
        """At most ``size`` times :attr:`share` records of a part.

        ``seed`` decides which and their order, not what is held out.
        """
        if part not in _PARTS[self.role]:
            return []
        random = np.random.default_rng([seed, *self.name.encode()])
        limit = hardest if self.role == "trained" and self.graded else 1.0
        size = round(size * self.share)
        drawn = (q for q in self.questions(size, random) if q.difficulty <= limit)
        found = list({q.text: q for q in drawn if self._belongs(q, part)}.values())
        return [self._record(found[i], part) for i in random.permutation(len(found))[:size]]

    def _belongs(self, question: Question, part: Part) -> bool:
        own = part_of(question.subject)
        if part == "evaluate":
            return own == part or question.subject.partition(":")[0] in NEVER_TAUGHT
        if any(part_of(other) == "evaluate" for other in question.others):
            return False
        return own == part or (self.role == "warm_up" and own != "evaluate")

    def _record(self, question: Question, part: Part) -> Record:
        return Record(
            id=f"{self.name}-{hashlib.sha256(question.text.encode()).hexdigest()[:12]}",
            dataset=self.name,
            category=self.category,
            question=question.text,
            answer=question.aliases[0],
            metadata={
                "aliases": list(question.aliases),
                "difficulty": round(question.difficulty, 4),
                "entities": [question.subject, *question.others],
                "grader": "factual",
                "instruction": "Answer with nothing but the name or the number.",
                "part": part,
                "role": self.role,
            },
        )


def part_of(entity: str) -> Part:
    """The part of an entity, by the hash of its key; independent of seeds and sizes."""
    share = int.from_bytes(hashlib.sha256(entity.encode()).digest()[:8], "big") / 2**64
    return "evaluate" if share < HELD_OUT else "warm_up" if share < HELD_OUT + WARMED_UP else "train"


FAMILIES = (
    Family("capitals", "trained", "factual", questions.capitals),
    Family("cities", "trained", "factual", questions.cities, graded=False),
    Family("subdivisions", "trained", "factual", questions.subdivisions, graded=False),
    Family("languages", "trained", "factual", questions.languages),
    Family("additions", "trained", "math", questions.additions, share=0.5),
    Family("differences", "trained", "math", questions.differences, share=0.5),
    Family("letters", "warm_up", "factual", questions.letters),
    Family("neighbours", "warm_up", "factual", questions.neighbours),
    Family("products", "near", "math", questions.products, share=0.4),
    Family("continents", "near", "factual", questions.continents, share=0.4),
    Family("capital_of", "near", "factual", questions.capital_of, share=0.4),
    Family("domains", "near", "factual", questions.domains, share=0.4),
    Family("symbols", "far", "factual", questions.symbols, share=0.4),
    Family("elements", "far", "factual", questions.elements, share=0.4),
    Family("currencies", "far", "factual", questions.country_currencies, share=0.4),
    Family("currency_codes", "far", "factual", questions.currency_codes, share=0.4),
)


@dataclass(frozen=True)
class Sizes:
    """The most records of a family per part, times its share; greatest difficulty of capitals, codes and sums."""

    train: int = 600
    evaluate: int = 150
    warm_up: int = 80
    hardest: float = 1.0


def real_world_records(part: Part, size: int, seed: int = 0, hardest: float = 1.0) -> list[Record]:
    """Records of one part; no entity that ``evaluate`` asks about is in the other parts.

    Args:
        part: ``train``, ``warm_up`` or ``evaluate``.
        size: the most per family.
        seed: of the choice and order of questions.
        hardest: the greatest difficulty, from 0 to 1, of the trained families' questions.

    Raises:
        MissingDependencyError: a package that contains the data is not installed.
    """
    try:
        return [record for family in FAMILIES for record in family.records(part, size, seed, hardest)]
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the package {error.name} contains the data and is not installed: pip install 'coca-mindspeed[real-world]'"
        ) from error


def real_world_sets(sizes: Sizes, seed: int = 0) -> dict[Part, list[Record]]:
    """The three sets, ``evaluate`` last."""
    parts: tuple[Part, ...] = ("warm_up", "train", "evaluate")
    return {part: real_world_records(part, getattr(sizes, part), seed, sizes.hardest) for part in parts}


def write_real_world(output: Path, sizes: Sizes, seed: int, *, overwrite: bool = False) -> dict[str, int]:
    """Write ``warm_up.jsonl``, ``train.jsonl`` and ``evaluate.jsonl`` and return their sizes; nothing on an error.

    Raises:
        DataError: the output exists.
        MissingDependencyError: a package that contains the data is not installed.
    """
    check_output_path(output, overwrite)
    with output_directory(output, overwrite) as directory:
        sets = real_world_sets(sizes, seed)
        for part, records in sets.items():
            write_records(directory / f"{part}.jsonl", records)
    return {f"{part}.jsonl": len(records) for part, records in sets.items()}
