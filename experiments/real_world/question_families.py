"""A family of questions: what it asks, about which entities, and whether anything is ever trained on it."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coca_mindspeed.data.records import Record

Role = Literal["trained", "warm_up", "near", "far"]
Part = Literal["evaluate", "warm_up", "train"]
HELD_OUT, WARMED_UP = 0.3, 0.15  # shares of the entities
INSTRUCTION = "Answer with nothing but the name or the number."


@dataclass(frozen=True, slots=True)
class Question:
    """One question, before it has a place in a set.

    Attributes:
        text: as it is asked.
        aliases: every accepted answer, the one that is taught first.
        subject: key of the entity that it asks about (``country:FR``); its hash decides the part.
        others: keys of the entities that the answer names; none of them is held out where it is taught.
        difficulty: from 0 (easiest) to 1.
    """

    text: str
    aliases: tuple[str, ...]
    subject: str
    others: tuple[str, ...] = ()
    difficulty: float = 0.5


@dataclass(frozen=True)
class Family:
    """Questions of one kind.

    Attributes:
        name: the records' data set.
        role: ``trained``; ``warm_up``: asked in the warm-up alone; ``near`` and ``far``: never trained on, like a
            trained family or not.
        category: of the paper's tables.
        questions: all there are, or as many as are asked for, drawn by the generator.
    """

    name: str
    role: Role
    category: str
    questions: Callable[[int, np.random.Generator], Iterable[Question]]

    def records(self, part: Part, size: int, seed: int, hardest: float = 1.0) -> list[Record]:
        """At most ``size`` records of a part, in an order of their own.

        Args:
            part: a family that is never trained on has none but those of ``evaluate``.
            size: the most.
            seed: draws which, and their order; not what is held out.
            hardest: questions of a trained family that are more difficult are left out, in every part.
        """
        if part not in _PARTS[self.role]:
            return []
        random = np.random.default_rng([seed, *self.name.encode()])
        limit = hardest if self.role == "trained" else 1.0
        asked = (q for q in self.questions(size, random) if q.difficulty <= limit)
        found = {q.text: q for q in asked if self._belongs(q, part)}
        order = random.permutation(len(found))[:size]
        questions = list(found.values())
        return [self._record(questions[i], part) for i in order]

    def _belongs(self, question: Question, part: Part) -> bool:
        if part == "evaluate":
            # Nothing is taught of entities of its own, so all of them are held out.
            return part_of(question.subject) == part or question.subject.partition(":")[0] in NEVER_TAUGHT
        if any(part_of(other) == "evaluate" for other in question.others):
            return False
        return part_of(question.subject) == part or (self.role == "warm_up" and part_of(question.subject) != "evaluate")

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
                "instruction": INSTRUCTION,
                "part": part,
                "role": self.role,
            },
        )


_PARTS: dict[Role, Sequence[Part]] = {
    "trained": ("train", "warm_up", "evaluate"),
    "warm_up": ("warm_up",),
    "near": ("evaluate",),
    "far": ("evaluate",),
}
#: Kinds of entities of which no training and no warm-up ever speaks.
NEVER_TAUGHT = frozenset(("element", "currency", "product"))


def part_of(entity: str) -> Part:
    """The part that an entity belongs to, by the hash of its key alone: neither a seed nor a size changes it."""
    share = int.from_bytes(hashlib.sha256(entity.encode()).digest()[:8], "big") / 2**64
    return "evaluate" if share < HELD_OUT else "warm_up" if share < HELD_OUT + WARMED_UP else "train"
