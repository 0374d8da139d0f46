"""Generated data sets: equal parts of several kinds of questions, disjoint splits, reproducible by seed."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from coca_mindspeed.data.records import Record

Split = Literal["train", "evaluate"]

_MAX_MISSES = 10_000  # draws without a new question after which a kind counts as exhausted


class Question(NamedTuple):
    """A generated question, its answer, and the text whose hash decides its split (shared by equivalent questions)."""

    text: str
    answer: str
    split_key: str


class Kind(Protocol):
    """Questions of one difficulty."""

    @property
    def name(self) -> str: ...

    def draw(self, random: np.random.Generator) -> Question:
        """Draw a question."""
        ...


@dataclass(frozen=True)
class Generator:
    """Generates the records of one data set; ``stream`` makes the random numbers of data sets independent.

    ``held_out`` is the fraction of the questions in the split ``evaluate``.  ``max_repeats`` is the most times that a
    training set asks a question (None: any number), because a confidence that is trained on few questions states the
    rates of memorised answers.
    """

    dataset: str
    category: str
    kinds: Sequence[Kind]
    held_out: float
    stream: tuple[int, ...] = ()
    max_repeats: int | None = 1

    def records(self, size: int, split: Split, seed: int) -> list[Record]:
        """Draw ``size`` questions in random order.

        A question's split depends on its text alone, so the splits are disjoint for all sizes and seeds.  Held-out
        questions are distinct; a training question is asked at most ``max_repeats`` times.

        Raises ValueError: a kind has too few distinct questions.
        """
        drawn: list[tuple[Question, str]] = []
        for index, kind in enumerate(self.kinds):
            share = size // len(self.kinds) + (index < size % len(self.kinds))
            random = np.random.default_rng([seed, *self.stream, index])
            drawn += [(question, kind.name) for question in self._draw(kind, share, split, random)]
        order = np.random.default_rng([seed, *self.stream, len(self.kinds)]).permutation(size)
        return [
            Record(
                id=f"{self.dataset}-{split}-{seed}-{number}",
                dataset=self.dataset,
                category=self.category,
                question=question.text,
                answer=question.answer,
                # The tiny model cannot read "step by step" or write a box.
                metadata={"instruction": "", "kind": kind, "grader": "exact"},
            )
            for number, (question, kind) in enumerate(drawn[i] for i in order)
        ]

    def _draw(self, kind: Kind, count: int, split: Split, random: np.random.Generator) -> list[Question]:
        most = (self.max_repeats or count) if split == "train" else 1
        questions: list[Question] = []
        asked: Counter[str] = Counter()
        misses = 0
        while len(questions) < count:
            question = kind.draw(random)
            misses += 1
            if misses > _MAX_MISSES + 1:
                times = "once" if most == 1 else f"at most {most} times"
                raise ValueError(
                    f"kind {kind.name}, {split}: found {len(questions)} of {count} questions, with each asked {times}; "
                    f"ask for fewer records{'' if split == 'evaluate' else ', or allow a larger max_repeats'}"
                )
            if self._split_of(question) == split and asked[question.text] < most:
                misses = 0
                asked[question.text] += 1
                questions.append(question)
        return questions

    def _split_of(self, question: Question) -> Split:
        digest = hashlib.sha256(question.split_key.encode()).digest()
        return "evaluate" if int.from_bytes(digest[:8], "big") < self.held_out * 2**64 else "train"


def units_first(number: int, width: int = 1) -> str:
    """Write digits in reverse order, zero-padded: 12 in width 4 is ``2100``."""
    return f"{number:0{width}d}"[::-1]


@dataclass(frozen=True)
class _Kind:
    """Questions of one difficulty; a one-digit operand may be 0.

    ``commutes``: the operands may be in either order, and both orders are in the same split.
    """

    operator: str
    digits: tuple[int, int]
    compute: Callable[[int, int], int]
    commutes: bool = True

    @property
    def name(self) -> str:
        return f"{self.digits[0]}{self.operator}{self.digits[1]}"

    def draw(self, random: np.random.Generator) -> Question:
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
# The two smallest kinds have 1,440 training questions each: 50,000 records ask them 5 times on average, 18 at most.
_ARITHMETIC = Generator("arithmetic", "math", _KINDS, held_out=0.2, max_repeats=30)


def arithmetic_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw sums, products and remainders of seven kinds; see :meth:`Generator.records`."""
    return _ARITHMETIC.records(size, split, seed)
