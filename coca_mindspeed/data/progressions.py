"""Long answers: every term of a progression is written out, and all of them have to be right.

``21+70`` asks for the terms after 12 in steps of 7 (``91=62=33=...``), ``21*30`` for 12 times 3, times 3 again, and so
on, always modulo 100, with steps and factors below ten.  As in :mod:`.arithmetic`, numbers are written units first.
Each term needs the one before it, so one slip spoils the answer, and small rates of error add up.
"""

from dataclasses import dataclass

import numpy as np

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.splits import Split, split_of

_HELD_OUT = 0.5  # share of the questions that is never trained on; there are only 300 to 600 of a kind
_PATIENCE = 10_000  # draws without a new question after which a kind counts as used up
_MODULUS = 100


@dataclass(frozen=True)
class _Kind:
    """Steps of one size: ``operator`` with a right operand from ``low`` to ``high`` - 1."""

    operator: str
    low: int
    high: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.high - 1}"

    def terms(self, start: int, step: int, count: int) -> list[int]:
        terms = []
        for _ in range(count):
            start = (start + step if self.operator == "+" else start * step) % _MODULUS
            terms.append(start)
        return terms


_KINDS = (_Kind("+", 1, 4), _Kind("+", 4, 10), _Kind("*", 2, 5), _Kind("*", 5, 10))


def progression_records(size: int, split: Split, seed: int, terms: int) -> list[Record]:
    """Draw ``size`` questions in equal parts of four kinds, in random order; the splits are disjoint.

    Args:
        size: number of records.
        split: ``train`` or ``evaluate``; held-out questions are all different.
        seed: draws the questions and their order.
        terms: terms of an answer, which is then ``3 * terms - 1`` tokens of the tiny model long.

    Raises:
        ValueError: a kind does not have so many different held-out questions; the smallest has about 150.
    """
    drawn: list[tuple[str, str, str]] = []
    for index, kind in enumerate(_KINDS):
        share = size // len(_KINDS) + (index < size % len(_KINDS))
        random = np.random.default_rng([seed, 4, index])
        seen: set[str] = set()
        misses = found = 0
        while found < share:
            start, step = int(random.integers(_MODULUS)), int(random.integers(kind.low, kind.high))
            question = f"{_units_first(start)}{kind.operator}{_units_first(step)}"
            if split_of(question, _HELD_OUT) != split or (split == "evaluate" and question in seen):
                misses += 1
                if misses > _PATIENCE:
                    raise ValueError(f"found only {found} of {share} different held-out questions {kind.name}")
                continue
            misses = 0
            found += 1
            seen.add(question)
            answer = "=".join(map(_units_first, kind.terms(start, step, terms)))
            drawn.append((question, answer, kind.name))
    order = np.random.default_rng([seed, 4, len(_KINDS)]).permutation(size)
    return [
        Record(
            id=f"progressions-{split}-{seed}-{number}",
            dataset="progressions",
            category="math",
            question=drawn[i][0],
            answer=drawn[i][1],
            metadata={"instruction": "", "kind": drawn[i][2], "grader": "exact"},
        )
        for number, i in enumerate(order)
    ]


def _units_first(number: int) -> str:
    return f"{number:02d}"[::-1]
