"""Small programs run by hand: the embedded stand-in for the paper's code benchmarks.

``>3142`` asks for the digits in descending order (``4321``), ``7#27177`` for how often a digit occurs (``3``).  Strings
of three to six digits give graded difficulty.
"""

from dataclasses import dataclass

import numpy as np

from coca_mindspeed.data.arithmetic import Generator, Question, Split
from coca_mindspeed.data.records import Record

_LENGTHS = (3, 4, 5, 6)


@dataclass(frozen=True)
class _Kind:
    operator: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.length}"

    def draw(self, random: np.random.Generator) -> Question:
        """One question at random."""
        digits = "".join(map(str, random.integers(10, size=self.length)))
        if self.operator == ">":
            text, answer = f">{digits}", "".join(sorted(digits, reverse=True))
        else:
            # A digit of the string itself every other time, or zero would nearly always be the answer.
            counted = digits[random.integers(self.length)] if random.integers(2) else str(random.integers(10))
            text, answer = f"{counted}#{digits}", str(digits.count(counted))
        return Question(text, answer, split_key=text)


_KINDS = tuple(_Kind(operator, length) for operator in (">", "#") for length in _LENGTHS)
_DIGITS = Generator("digits", "code", _KINDS, held_out=0.2, stream=(1,))


def digit_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw questions of eight kinds; see :meth:`.generated.Generator.records`."""
    return _DIGITS.records(size, split, seed)
