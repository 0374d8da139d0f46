"""The paper's data in miniature: what the tiny model is taught, trained and evaluated on.

``short``: arithmetic is the trained category (math); programs run by hand (code) and facts (factual) are taught in the
warm-up and never trained on.  ``long``: progressions alone, whose answers are ten times as long.
"""

from dataclasses import dataclass
from typing import Literal

from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record
from experiments.miniature.digits import digit_records
from experiments.miniature.progressions import progression_records
from experiments.miniature.recall import fact_book

SYMBOLS = "?#>"  # of the questions, besides those of the arithmetic
MiniatureName = Literal["short", "long"]
_TERMS = 25  # of a progression: a response of 80 tokens, six of which are the confidence


@dataclass(frozen=True)
class Miniature:
    """Records by their use.

    Attributes:
        warm_up: what the tiny model reads before any training.
        train: what it is trained on.
        evaluate: held-out questions; of facts, all, taught or not.
    """

    warm_up: list[Record]
    train: list[Record]
    evaluate: list[Record]


def miniature(name: MiniatureName, seed: int = 0, *, size: int = 50_000, evaluate: int = 1000) -> Miniature:
    """Draw the records.

    Args:
        name: see above.
        seed: draws everything.
        size: training records; the warm-up has about as many.
        evaluate: held-out questions of each family; facts have a number of their own, and of progressions, of which
            there are few, it is half as many.
    """
    if name == "long":
        train = progression_records(size, "train", seed, _TERMS)
        return Miniature(train, train, progression_records(evaluate // 2, "evaluate", seed, _TERMS))
    book = fact_book(seed)
    train = arithmetic_records(size, "train", seed)
    others = [*digit_records(size * 6 // 50, "train", seed), *book.lessons(size * 9 // 50, seed)]
    return Miniature(
        warm_up=[*train[: size * 7 // 10], *others],
        train=train,
        evaluate=[
            *arithmetic_records(evaluate, "evaluate", seed),
            *digit_records(evaluate, "evaluate", seed),
            *book.records,
        ],
    )
