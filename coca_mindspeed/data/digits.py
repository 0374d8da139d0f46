"""Small programs run by hand: the embedded stand-in for the paper's code benchmarks.

``>3142`` asks for the digits in descending order (``4321``), ``7#27177`` for how often a digit occurs (``3``).  Strings
of three to six digits give graded difficulty.
"""

from dataclasses import dataclass

import numpy as np

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.splits import Split, split_of

_HELD_OUT = 0.2  # share of the questions that is never taught
_LENGTHS = (3, 4, 5, 6)
_PATIENCE = 10_000  # draws without a new question after which a kind counts as used up


@dataclass(frozen=True)
class _Kind:
    operator: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.length}"

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        """A question and its answer."""
        digits = "".join(map(str, random.integers(10, size=self.length)))
        if self.operator == ">":
            return f">{digits}", "".join(sorted(digits, reverse=True))
        # A digit of the string itself every other time, or zero would nearly always be the answer.
        counted = digits[random.integers(self.length)] if random.integers(2) else str(random.integers(10))
        return f"{counted}#{digits}", str(digits.count(counted))


_KINDS = tuple(_Kind(operator, length) for operator in (">", "#") for length in _LENGTHS)


def digit_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw ``size`` questions in equal parts of eight kinds, in random order.

    The splits are disjoint; held-out questions are all different, training questions are drawn with replacement.

    Args:
        size: number of records.
        split: ``train`` or ``evaluate``.
        seed: draws the questions and their order.

    Raises:
        ValueError: a kind does not have so many different held-out questions.
    """
    drawn: list[tuple[str, str, str]] = []
    for index, kind in enumerate(_KINDS):
        share = size // len(_KINDS) + (index < size % len(_KINDS))
        random = np.random.default_rng([seed, 1, index])
        seen: set[str] = set()
        misses = found = 0
        while found < share:
            question, answer = kind.draw(random)
            if split_of(question, _HELD_OUT) != split or (split == "evaluate" and question in seen):
                misses += 1
                if misses > _PATIENCE:
                    raise ValueError(f"found only {found} of {share} different held-out questions {kind.name}")
                continue
            misses = 0
            found += 1
            seen.add(question)
            drawn.append((question, answer, kind.name))
    order = np.random.default_rng([seed, 1, len(_KINDS)]).permutation(size)
    return [
        Record(
            id=f"digits-{split}-{seed}-{number}",
            dataset="digits",
            category="code",
            question=drawn[i][0],
            answer=drawn[i][1],
            metadata={"instruction": "", "kind": drawn[i][2], "grader": "exact"},
        )
        for number, i in enumerate(order)
    ]
