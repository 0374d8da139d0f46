"""The paper's data in miniature, for the tiny model.

``short``: arithmetic (math) is trained on; programs run by hand (code) and facts (factual) are taught in the SFT
warm-up only.  ``long``: progressions, whose answers are ten times as long; no question is asked twice, and those of the
warm-up are not trained on.  ``long_repeated``: progressions of 844 different training questions, each asked about sixty
times, on which the confidence states the rates of memorised answers.  As in the arithmetic data, numbers are written
units first.

``scratch``: the last two of 60 terms of a recurrence, answered at once or behind a thought that writes the terms;
``scratch_long``: the same questions, whose answer is all terms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from coca_mindspeed.algorithm.parsing import END_THINK_TAG, THINK_TAG
from coca_mindspeed.data.arithmetic import Generator, Question, Split, arithmetic_records, units_first
from coca_mindspeed.data.records import Record

FACTS = 400
MiniatureName = Literal["short", "long", "long_repeated", "scratch", "scratch_long"]
SYMBOLS = "?#>"  # characters of the questions that arithmetic does not use
_THOUGHTS = (THINK_TAG, END_THINK_TAG)
_SHORTENED = 0.25  # of the thoughts in the warm-up end early


def symbols_of(name: MiniatureName) -> Sequence[str]:
    """The tokens that the tiny model needs beside those of arithmetic."""
    return _THOUGHTS if name == "scratch" else SYMBOLS


@dataclass(frozen=True)
class Miniature:
    """Records of the SFT warm-up, of training and of evaluation (all facts, taught or not)."""

    warm_up: list[Record]
    train: list[Record]
    evaluate: list[Record]


def miniature(name: MiniatureName, seed: int = 0, *, size: int = 50_000, evaluate: int = 1000) -> Miniature:
    """Draw the records.

    Args:
        name: see the module.
        seed: of all draws.
        size: number of training records; the warm-up has about as many.
        evaluate: held-out questions per family, half as many for progressions; the number of facts is fixed.
    """
    if name == "long":
        drawn = progression_records(2 * size, "train", seed)
        return Miniature(drawn[:size], drawn[size:], progression_records(evaluate // 2, "evaluate", seed))
    if name == "long_repeated":
        train = repeated_progression_records(size, "train", seed)
        return Miniature(train, train, repeated_progression_records(evaluate // 2, "evaluate", seed))
    if name in ("scratch", "scratch_long"):
        drawn, held_out = scratch_records(2 * size, "train", seed), scratch_records(evaluate, "evaluate", seed)
        if name == "scratch_long":
            return Miniature(drawn[:size], drawn[size:], held_out)
        random = np.random.default_rng([seed, 7])
        shown = [_shown(record, i % 2 == 1, random) for i, record in enumerate(drawn[:size])]
        return Miniature(shown, [_last_terms(r) for r in drawn[size:]], [_last_terms(r) for r in held_out])
    book = fact_book(seed)
    train = arithmetic_records(size, "train", seed)
    others = [*digit_records(size * 6 // 50, "train", seed), *book.mentions(size * 9 // 50, seed)]
    held_out = [*arithmetic_records(evaluate, "evaluate", seed), *digit_records(evaluate, "evaluate", seed)]
    return Miniature([*train[: size * 7 // 10], *others], train, [*held_out, *book.records])


@dataclass(frozen=True)
class _DigitKind:
    operator: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.length}"

    def draw(self, random: np.random.Generator) -> Question:
        digits = "".join(map(str, random.integers(10, size=self.length)))
        if self.operator == ">":
            text, answer = f">{digits}", "".join(sorted(digits, reverse=True))
        else:
            # Count a digit of the string every other time; otherwise the answer would nearly always be zero.
            counted = digits[random.integers(self.length)] if random.integers(2) else str(random.integers(10))
            text, answer = f"{counted}#{digits}", str(digits.count(counted))
        return Question(text, answer, split_key=text)


def digit_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw programs run by hand: ``>3142`` sorts digits (``4321``), ``7#27177`` counts a digit (``3``)."""
    kinds = tuple(_DigitKind(operator, length) for operator in (">", "#") for length in (3, 4, 5, 6))
    return Generator("digits", "code", kinds, held_out=0.2, stream=(1,), max_repeats=30).records(size, split, seed)


@dataclass(frozen=True)
class _ProgressionKind:
    """Progressions modulo ``modulus``, a power of ten, whose step or factor is from ``low`` to ``high`` - 1."""

    operator: str
    low: int
    high: int
    modulus: int
    terms: int

    @property
    def name(self) -> str:
        return f"{self.operator}{self.high - 1}"

    def draw(self, random: np.random.Generator) -> Question:
        width = len(str(self.modulus)) - 1
        term, step = int(random.integers(self.modulus)), int(random.integers(self.low, self.high))
        text = f"{units_first(term, width)}{self.operator}{units_first(step, width)}"
        answer = []
        for _ in range(self.terms):
            term = (term + step if self.operator == "+" else term * step) % self.modulus
            answer.append(units_first(term, width))
        return Question(text, "=".join(answer), split_key=text)


def progression_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw sums modulo 10,000 by steps of two to four digits, and products by 2 to 9: ``2100+7500`` asks for the 15
    terms after 12 in steps of 57 (``9600=6210=3810=...``, 74 tokens of the tiny model).

    No question is drawn twice; the smallest kind has about 64,000 training questions.

    Raises:
        ValueError: too few different questions of a kind.
    """
    ranges = (("+", 10, 100), ("+", 100, 1000), ("+", 1000, 10_000), ("*", 2, 10))
    kinds = [_ProgressionKind(operator, low, high, 10_000, 15) for operator, low, high in ranges]
    return Generator("progressions", "math", kinds, held_out=0.2, stream=(5,)).records(size, split, seed)


def repeated_progression_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw sums and products modulo 100: ``21+70`` asks for the 25 terms after 12 in steps of 7 (``91=62=33=...``, 74
    tokens).  There are only 844 different training questions.

    Raises:
        ValueError: too few different held-out questions of a kind; the smallest kind has about 150.
    """
    ranges = (("+", 1, 4), ("+", 4, 10), ("*", 2, 5), ("*", 5, 10))
    kinds = [_ProgressionKind(operator, low, high, 100, 25) for operator, low, high in ranges]
    # A kind has only 300 to 600 questions, so half of them are held out.
    generator = Generator("progressions", "math", kinds, held_out=0.5, stream=(4,), max_repeats=None)
    return generator.records(size, split, seed)


@dataclass(frozen=True)
class _RecurrenceKind:
    """Digits that follow from the four digits before them."""

    operator: str
    following: Callable[[Sequence[int]], int]

    @property
    def name(self) -> str:
        return self.operator

    def draw(self, random: np.random.Generator) -> Question:
        return self.ask(random.integers(10, size=4).tolist())

    def ask(self, digits: Sequence[int]) -> Question:
        """The question for the 60 digits that follow four."""
        terms, text = list(digits), f"{''.join(map(str, digits))}{self.operator}"
        for _ in range(60):
            terms.append(self.following(terms[-4:]) % 10)
        return Question(text, "".join(map(str, terms[4:])), split_key=text)


RECURRENCES = (
    _RecurrenceKind("%", lambda last: last[0]),
    _RecurrenceKind("+", lambda last: last[3] + last[0]),
    _RecurrenceKind("*", lambda last: last[3] * last[0]),
    _RecurrenceKind(".", lambda last: last[3] * last[2] + last[0]),
)


def scratch_records(size: int, split: Split, seed: int) -> list[Record]:
    """Draw recurrences modulo 10 with their 60 terms: in ``1234+``, each is the sum of those one and four before it.

    That is 5, 7, 0, 4, and so on.  Kinds: copies (``%``), sums, products (``*``), products plus a term (``.``).
    No question is drawn twice.
    """
    return Generator("recurrences", "math", RECURRENCES, held_out=0.2, stream=(6,)).records(size, split, seed)


def _last_terms(record: Record) -> Record:
    return replace(record, answer=record.answer[-2:])


def _shown(record: Record, thinking: bool, random: np.random.Generator) -> Record:
    """A record of the warm-up: the last terms, behind a thought of all terms, or at times of fewer."""
    if not thinking:
        return _last_terms(record)
    terms = int(random.integers(1, 60)) if random.random() < _SHORTENED else 60
    answer = f"{record.answer[:terms]}{END_THINK_TAG}{record.answer[-2:]}"
    return replace(record, question=f"{record.question}{THINK_TAG}", answer=answer)


@dataclass(frozen=True)
class FactBook:
    """Facts that can only be remembered, in random order, and how often a text mentions each (0: never taught)."""

    records: Sequence[Record]
    popularity: Sequence[float]

    def mentions(self, size: int, seed: int) -> list[Record]:
        """Draw ``size`` mentions of taught facts by popularity."""
        chosen = np.random.default_rng([seed, 3]).choice(FACTS, size=size, p=np.asarray(self.popularity))
        return [replace(self.records[fact], id=f"facts-lesson-{seed}-{i}") for i, fact in enumerate(chosen)]


def fact_book(seed: int) -> FactBook:
    """Draw 400 facts; half are taught, by Zipf's law.  ``?271`` asks for two digits about number 271."""
    taught = FACTS // 2
    random = np.random.default_rng([seed, 2])
    subjects = random.choice(1000, size=FACTS, replace=False)
    answers = random.integers(100, size=FACTS)
    popularity = np.zeros(FACTS)
    popularity[random.permutation(FACTS)[:taught]] = 1 / np.arange(1, taught + 1)
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
