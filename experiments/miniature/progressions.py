"""Long answers: every term of a progression is written out, and all of them have to be right.

``21+70`` asks for the terms after 12 in steps of 7 (``91=62=33=...``), ``21*30`` for 12 times 3, times 3 again, and so
on, always modulo 100, with steps and factors below ten.  As in :mod:`.arithmetic`, numbers are written units first.
Each term needs the one before it, so one slip spoils the answer, and small rates of error add up.
"""

from dataclasses import dataclass

import numpy as np

from coca_mindspeed.data.arithmetic import Generator, Question, Split, units_first
from coca_mindspeed.data.records import Record

_MODULUS = 100


@dataclass(frozen=True)
class _Kind:
    """Steps of one size: ``operator`` with a right operand from ``low`` to ``high`` - 1; answers of ``count`` terms."""

    operator: str
    low: int
    high: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.high - 1}"

    def draw(self, random: np.random.Generator) -> Question:
        """One question at random."""
        start, step = int(random.integers(_MODULUS)), int(random.integers(self.low, self.high))
        text = f"{units_first(start, 2)}{self.operator}{units_first(step, 2)}"
        terms = []
        for _ in range(self.count):
            start = (start + step if self.operator == "+" else start * step) % _MODULUS
            terms.append(units_first(start, 2))
        return Question(text, "=".join(terms), split_key=text)


def progression_records(size: int, split: Split, seed: int, terms: int) -> list[Record]:
    """Draw questions of four kinds; see :meth:`.generated.Generator.records`.

    Args:
        size: number of records.
        split: ``train`` or ``evaluate``.
        seed: draws the questions and their order.
        terms: terms of an answer, which is then ``3 * terms - 1`` tokens of the tiny model long.

    Raises:
        ValueError: a kind does not have so many different held-out questions; the smallest has about 150.
    """
    kinds = [
        _Kind(operator, low, high, terms)
        for operator, low, high in (("+", 1, 4), ("+", 4, 10), ("*", 2, 5), ("*", 5, 10))
    ]
    # There are only 300 to 600 questions of a kind, so half of them are held out.
    return Generator("progressions", "math", kinds, held_out=0.5, stream=(4,)).records(size, split, seed)
