"""Training questions that share a passage with an evaluation question.

The usual rule (GPT-3's, with 13 words): a training question is contaminated if it shares any run of n words with an
evaluation question.  Words are compared without case, symbols and white space.  An evaluation question of fewer than
n words counts as one run; of fewer than ``SHORTEST`` words, it has to be the whole training question.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coca_mindspeed.data.preparing.shingles import Hashes, ngram_hashes, normalise, words
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError

SHORTEST = 6  # words


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a training question shares with an evaluation question."""

    dataset: str
    record: str
    passage: str


class EvaluationIndex:
    """The runs of words of evaluation questions.

    Args:
        records: the evaluation questions.
        n: length of a run, in words.

    Raises:
        DataError: ``n`` is below :data:`SHORTEST`.
    """

    def __init__(self, records: Iterable[Record], n: int) -> None:
        if n < SHORTEST:
            raise DataError(f"a shared passage (--ngram) should be at least {SHORTEST} words long, found {n}")
        self._owners: list[tuple[str, str]] = []
        self._whole: dict[int, int] = {}
        runs: dict[int, list[tuple[Hashes, int]]] = {}
        self.questions: Counter[str] = Counter()
        for owner, record in enumerate(records):
            self._owners.append((record.dataset, record.id))
            self.questions[record.dataset] += 1
            units = words(normalise(record.question))
            if not units:
                continue
            self._whole.setdefault(int(ngram_hashes(units, len(units))[0]), owner)
            if len(units) >= SHORTEST:
                length = min(n, len(units))
                runs.setdefault(length, []).append((ngram_hashes(units, length), owner))
        self._runs = {length: _sorted(found) for length, found in sorted(runs.items(), reverse=True)}

    def overlap(self, record: Record) -> Overlap | None:
        """The longest indexed run that the question holds, the first if there are several; None if there is none."""
        units = words(normalise(record.question))
        if not units:
            return None
        whole = self._whole.get(int(ngram_hashes(units, len(units))[0]))
        if whole is not None:
            return Overlap(*self._owners[whole], " ".join(units))
        for length, (hashes, owners) in self._runs.items():
            if len(units) < length:
                continue
            mine = ngram_hashes(units, length)
            places = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
            hits = np.flatnonzero(hashes[places] == mine)
            if len(hits):
                dataset, identity = self._owners[int(owners[places[hits[0]]])]
                return Overlap(dataset, identity, " ".join(units[hits[0] : hits[0] + length]))
        return None


def _sorted(found: list[tuple[Hashes, int]]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    hashes = np.concatenate([grams for grams, _ in found])
    owners = np.repeat([owner for _, owner in found], [len(grams) for grams, _ in found])
    order = np.argsort(hashes, kind="stable")  # of equal runs, the first question's comes first
    return hashes[order], owners[order]
