"""The embedded data: arithmetic of graded difficulty, so that a small model's success rates spread over 0 to 1.

All numbers are written units first, operands zero-padded to four digits: 12 + 34 = 46 is ``2100+4300`` and ``64``.
The carry then goes from left to right and each digit of a sum stands at a fixed distance from the two that it needs,
which lets a small model learn in a minute what otherwise takes it ten.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coca_mindspeed.data.records import Record

Split = Literal["train", "evaluate"]
_HELD_OUT = 0.2  # share of each kind's questions that is never trained on
_PATIENCE = 10_000  # draws without a new question after which a kind counts as used up


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


_KINDS = (
    *(_Kind("+", digits, lambda a, b: a + b) for digits in ((1, 2), (2, 2), (3, 3), (4, 4))),
    *(_Kind("*", digits, lambda a, b: a * b) for digits in ((2, 1), (2, 2))),
    _Kind("%", (4, 1), lambda a, b: a % b, commutes=False),
)


def arithmetic_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw ``size`` questions in equal parts of seven kinds (sums, products, remainders), in random order.

    A question belongs to a split by the hash of its text (with the operands of a sum or product in order), so the
    splits are disjoint whatever the sizes and seeds.  Held-out questions are all different; training questions are
    drawn with replacement, because the small kinds would otherwise run out and the parts would not be equal.

    Args:
        size: number of records.
        split: ``train`` or ``evaluate``.
        seed: draws the questions and their order.

    Raises:
        ValueError: a kind does not have so many different held-out questions.
    """
    questions: list[tuple[str, str, _Kind]] = []
    for index, kind in enumerate(_KINDS):
        share = size // len(_KINDS) + (index < size % len(_KINDS))
        questions += _draw(kind, share, split, np.random.default_rng([seed, index]))
    order = np.random.default_rng([seed, len(_KINDS)]).permutation(size)
    return [
        Record(
            id=f"arithmetic-{split}-{seed}-{number}",
            dataset="arithmetic",
            category="math",
            question=question,
            answer=answer,
            # The tiny model cannot read "step by step" or write a box: the question stands alone.
            metadata={"instruction": "", "kind": kind.name, "grader": "exact"},
        )
        for number, (question, answer, kind) in enumerate(questions[i] for i in order)
    ]


def _draw(kind: _Kind, count: int, split: Split, random: np.random.Generator) -> list[tuple[str, str, _Kind]]:
    lows = [0 if digits == 1 else 10 ** (digits - 1) for digits in kind.digits]
    if kind.operator == "%":
        lows = [0, 1]  # any number by any digit but zero
    highs = [10**digits for digits in kind.digits]
    drawn: dict[str, str] = {}
    result: list[tuple[str, str, _Kind]] = []
    misses = 0
    while len(result) < count:
        left, right = (int(random.integers(low, high)) for low, high in zip(lows, highs, strict=True))
        if kind.commutes and random.integers(2):
            left, right = right, left
        question = f"{_units_first(left, 4)}{kind.operator}{_units_first(right, 4)}"
        if _split_of(left, kind, right) != split or (split == "evaluate" and question in drawn):
            misses += 1
            if misses > _PATIENCE:
                raise ValueError(f"found only {len(result)} of {count} different held-out questions {kind.name}")
            continue
        misses = 0
        drawn[question] = _units_first(kind.compute(left, right))
        result.append((question, drawn[question], kind))
    return result


def _units_first(number: int, width: int = 1) -> str:
    return f"{number:0{width}d}"[::-1]


def _split_of(left: int, kind: _Kind, right: int) -> Split:
    low, high = sorted((left, right)) if kind.commutes else (left, right)
    digest = hashlib.sha256(f"{low}{kind.operator}{high}".encode()).digest()
    return "evaluate" if int.from_bytes(digest[:8], "big") < _HELD_OUT * 2**64 else "train"
