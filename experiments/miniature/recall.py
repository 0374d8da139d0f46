"""Facts that can only be remembered: the embedded stand-in for the paper's factual benchmarks.

``?271`` asks for what is known about number 271, two digits that nothing else tells.  Half of the facts are never
taught; the others come up unequally often, as in the world, so that some are known, some half known and some not at
all.  Knowing which is which is the point.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coca_mindspeed.data.records import Record

FACTS = 400


@dataclass(frozen=True)
class FactBook:
    """All facts.

    Attributes:
        records: one for each fact, in random order.
        popularity: probabilities of coming up in a text; 0 for the facts that are never taught.
    """

    records: Sequence[Record]
    popularity: Sequence[float]

    def lessons(self, size: int, seed: int) -> list[Record]:
        """``size`` mentions of taught facts, the popular ones most often."""
        chosen = np.random.default_rng([seed, 3]).choice(FACTS, size=size, p=np.asarray(self.popularity))
        return [replace(self.records[fact], id=f"facts-lesson-{seed}-{i}") for i, fact in enumerate(chosen)]


def fact_book(seed: int, taught: float = 0.5, exponent: float = 1.0) -> FactBook:
    """Draw the facts, and which of them are taught how often.

    Args:
        seed: draws everything.
        taught: share of the facts that come up at all.
        exponent: the fact of rank r comes up in proportion to ``r ** -exponent`` (Zipf).

    Raises:
        ValueError: ``taught`` leaves no fact, or is above 1.
    """
    count = round(taught * FACTS)
    if not 0 < count <= FACTS:
        raise ValueError(f"taught should be a share above 0 and up to 1, found {taught}")
    random = np.random.default_rng([seed, 2])
    subjects = random.choice(1000, size=FACTS, replace=False)
    answers = random.integers(100, size=FACTS)
    popularity = np.zeros(FACTS)
    popularity[random.permutation(FACTS)[:count]] = np.arange(1, count + 1) ** -exponent
    popularity /= popularity.sum()
    records = [
        Record(
            id=f"facts-{seed}-{number}",
            dataset="facts",
            category="factual",
            question=f"?{subjects[number]:03d}",
            answer=f"{answers[number]:02d}",
            metadata={"instruction": "", "kind": "taught" if popularity[number] else "never taught", "grader": "exact"},
        )
        for number in range(FACTS)
    ]
    return FactBook(records, popularity.tolist())
