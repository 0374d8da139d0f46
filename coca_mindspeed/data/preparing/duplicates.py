"""Questions that are there twice: exactly, or nearly.

Near duplicates are found by MinHash and banded locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", chapter 3) and then checked on the sets themselves, so whatever is dropped
really is that similar; only recall is probabilistic, and the bands are chosen for at least 99.9% at the threshold.

Similar words are not enough here: half of a mathematics data set is one template with other numbers.  Two
questions are near duplicates only if they also have the same numbers and the same gold answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coca_mindspeed.data.preparing.shingles import Hashes, digest, mix, ngram_hashes, normalise, numbers, tokens
from coca_mindspeed.data.records import Record

_SHINGLE = 3  # tokens
_PERMUTATIONS = 120
_RECALL = 0.999
_DOCUMENTS_PER_FLUSH = 512


class ExactDuplicates:
    """Remembers questions by a 64-bit hash of their normalised text."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}

    def first(self, record: Record, index: int) -> tuple[int, bool] | None:
        """``(index of the record that asked this, whether its gold answer is the same)``, or None and remember."""
        answer = digest(normalise(record.answer))
        known = self._first.setdefault(digest(normalise(record.question)), (index, answer))
        return None if known[0] == index else (known[0], known[1] == answer)


def shingles(question: str) -> Hashes:
    """The sorted distinct hashed token trigrams of a question."""
    return np.unique(ngram_hashes(tokens(normalise(question)), _SHINGLE))


def jaccard(left: Hashes, right: Hashes) -> float:
    """``|A and B| / |A or B|`` of two sorted sets."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def bands_for(threshold: float, permutations: int = _PERMUTATIONS) -> tuple[int, int]:
    """``(bands, rows)``: the longest bands whose chance of a collision at ``threshold`` is at least 99.9%.

    Two sets of similarity s collide in at least one of b bands of r rows with probability ``1 - (1 - s^r)^b``.
    """
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _RECALL:
            return bands, rows
    raise ValueError(f"no banding of {permutations} permutations finds pairs of similarity {threshold}")


class NearDuplicates:
    """Collects records in order, then says which repeat an earlier one.

    Memory: 8 bytes a record and band, and the shingles of those that collide.

    Args:
        threshold: Jaccard similarity of token trigrams from which two questions are near duplicates, in (0.3, 1].
    """

    def __init__(self, threshold: float) -> None:
        if not 0.3 < threshold <= 1:
            raise ValueError(f"threshold should be above 0.3 and at most 1, found {threshold}")
        self._threshold = threshold
        self._bands, self._rows = bands_for(threshold)
        generator = np.random.default_rng(0x5EED)
        size = self._bands * self._rows
        self._multipliers = generator.integers(1, 2**63, size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = generator.integers(0, 2**63, size, dtype=np.uint64)
        self._waiting: list[tuple[Hashes, int]] = []
        self._keys: list[npt.NDArray[np.uint64]] = []

    def add(self, record: Record) -> None:
        """Add the next record."""
        same = digest(repr((numbers(normalise(record.question)), normalise(record.answer))))
        self._waiting.append((shingles(record.question), same))
        if len(self._waiting) == _DOCUMENTS_PER_FLUSH:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        sets = [hashes for hashes, _ in self._waiting]
        # What has to be equal goes into every band's key: others do not even collide.
        same = np.array([key for _, key in self._waiting], dtype=np.uint64)
        everything = np.concatenate(sets)
        starts = np.cumsum([0, *(len(hashes) for hashes in sets[:-1])])
        keys = np.empty((len(sets), self._bands), dtype=np.uint64)
        for band in range(self._bands):
            key = same
            for row in range(band * self._rows, (band + 1) * self._rows):
                permuted = mix(everything * self._multipliers[row] + self._offsets[row])
                key = mix(key ^ np.minimum.reduceat(permuted, starts))
            keys[:, band] = key
        self._keys.append(keys)
        self._waiting.clear()

    def repeats(self, questions: Callable[[int], str]) -> dict[int, tuple[int, float]]:
        """For each record that repeats an earlier kept one: ``{its index: (the earlier index, their similarity)}``.

        Args:
            questions: the question of the record with this index, counted in the order of :meth:`add`.
        """
        self._flush()
        if not self._keys:
            return {}
        keys = np.concatenate(self._keys)
        groups = _collisions(keys)
        members: dict[tuple[int, int], list[int]] = {}
        sets: dict[int, Hashes] = {}
        found: dict[int, tuple[int, float]] = {}
        for index, bands in groups:
            mine = shingles(questions(index))
            buckets = [members.setdefault((band, int(keys[index, band])), []) for band in bands]
            for earlier in sorted({other for bucket in buckets for other in bucket}):
                if (similarity := jaccard(mine, sets[earlier])) >= self._threshold:
                    found[index] = (earlier, similarity)
                    break
            else:
                sets[index] = mine
                for bucket in buckets:
                    bucket.append(index)
        return found


def _collisions(keys: npt.NDArray[np.uint64]) -> Iterator[tuple[int, Sequence[int]]]:
    """``(record, bands in which its key is not the only one)`` in the order of records."""
    shared = np.zeros(keys.shape, dtype=bool)
    for band in range(keys.shape[1]):
        _, inverse, counts = np.unique(keys[:, band], return_inverse=True, return_counts=True)
        shared[:, band] = counts[inverse] > 1
    for index in np.flatnonzero(shared.any(axis=1)):
        yield int(index), np.flatnonzero(shared[index]).tolist()


def near_duplicates(records: Iterable[Record], threshold: float) -> dict[int, tuple[int, float]]:
    """:class:`NearDuplicates` for records that are in memory."""
    search, questions = NearDuplicates(threshold), []
    for record in records:
        search.add(record)
        questions.append(record.question)
    return search.repeats(questions.__getitem__)
