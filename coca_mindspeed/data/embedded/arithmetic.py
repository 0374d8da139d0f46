"""The embedded data: arithmetic of graded difficulty, so that a small model's success rates spread over 0 to 1.

All numbers are written units first, operands zero-padded to four digits: 12 + 34 = 46 is ``2100+4300`` and ``64``.
The carry then goes from left to right and each digit of a sum stands at a fixed distance from the two that it needs,
which lets a small model learn in a minute what otherwise takes it ten.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coca_mindspeed.data.embedded.generated import Generator, Question, Split, units_first
from coca_mindspeed.data.records import Record


@dataclass(frozen=True)
class _Kind:
    """Questions of one difficulty.

    Attributes:
        operator: as written in the question.
        digits: of the left and of the right operand; a one-digit operand may be 0.
        compute: the answer.
        commutes: whether the operands may come in either order; both orders then fall into the same split.
    """

    operator: str
    digits: tuple[int, int]
    compute: Callable[[int, int], int]
    commutes: bool = True

    @property
    def name(self) -> str:
        return f"{self.digits[0]}{self.operator}{self.digits[1]}"

    def draw(self, random: np.random.Generator) -> Question:
        """One question at random, its operands in either order where they commute."""
        lows = [0 if digits == 1 else 10 ** (digits - 1) for digits in self.digits]
        if self.operator == "%":
            lows = [0, 1]  # any number by any digit but zero
        highs = [10**digits for digits in self.digits]
        left, right = (int(random.integers(low, high)) for low, high in zip(lows, highs, strict=True))
        if self.commutes and random.integers(2):
            left, right = right, left
        low, high = sorted((left, right)) if self.commutes else (left, right)
        return Question(
            text=f"{units_first(left, 4)}{self.operator}{units_first(right, 4)}",
            answer=units_first(self.compute(left, right)),
            split_key=f"{low}{self.operator}{high}",
        )


_KINDS = (
    *(_Kind("+", digits, lambda a, b: a + b) for digits in ((1, 2), (2, 2), (3, 3), (4, 4))),
    *(_Kind("*", digits, lambda a, b: a * b) for digits in ((2, 1), (2, 2))),
    _Kind("%", (4, 1), lambda a, b: a % b, commutes=False),
)
_ARITHMETIC = Generator("arithmetic", "math", _KINDS, held_out=0.2)


def arithmetic_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw sums, products and remainders of seven kinds; see :meth:`.generated.Generator.records`."""
    return _ARITHMETIC.records(size, split, seed)
