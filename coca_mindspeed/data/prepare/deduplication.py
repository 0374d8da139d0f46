"""Duplicates, near duplicates and contamination, by hashed n-grams.

Hashes are 64-bit and depend on the text alone, so results are the same on every machine.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from coca_mindspeed.data.records import Record

Hashes = npt.NDArray[np.uint64]

# Scripts without spaces (kana, CJK, hangul) are cut into characters, all others into words; each remaining symbol
# is a token of its own, since x+2 and x-2 are different questions.
_SCRIPT = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = rf"[{_SCRIPT}]|[^\W_{_SCRIPT}]+"
_WORDS = re.compile(_WORD)
_TOKENS = re.compile(rf"{_WORD}|\S")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: odd, well mixed


def normalise(text: str) -> str:
    """Unicode compatibility form, case folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Words of a normalised text, without symbols."""
    return _WORDS.findall(text)


def tokens(text: str) -> list[str]:
    """Words and symbols of a normalised text."""
    return _TOKENS.findall(text)


def numbers(text: str) -> tuple[str, ...]:
    """Numbers of a normalised text, sorted, with repeats."""
    return tuple(sorted(_NUMBERS.findall(text)))


def digest(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=1 << 17)
def _word_hash(word: str) -> int:
    return digest(word)


def mix(values: Hashes) -> Hashes:
    """Spread 64-bit values over all bits (the finaliser of MurmurHash3); a bijection."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def ngram_hashes(units: list[str], n: int) -> Hashes:
    """Hashes of the n-grams of ``units`` in order, ``[len(units) - n + 1]``; of all units if they are fewer than n."""
    hashes = np.fromiter(map(_word_hash, units), dtype=np.uint64, count=len(units))
    if not units:
        return hashes
    n = min(n, len(units))
    # A polynomial in an odd base, modulo 2^64: order counts, and every word reaches every bit through the last mix.
    base = np.full(n, _MULTIPLIER, dtype=np.uint64)
    base[0] = 1
    return mix(np.lib.stride_tricks.sliding_window_view(hashes, n) @ np.multiply.accumulate(base))


_SHINGLE = 3  # tokens
_PERMUTATIONS = 120
_RECALL = 0.999


class ExactDuplicates:
    """Finds repeated questions by a 64-bit hash of their normalised text."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}

    def first(self, record: Record, index: int) -> tuple[int, bool] | None:
        """Return ``(index of the record with this question, whether the gold answers are equal)``, or None."""
        answer = digest(normalise(record.answer))
        known = self._first.setdefault(digest(normalise(record.question)), (index, answer))
        return None if known[0] == index else (known[0], known[1] == answer)


def shingles(question: str) -> Hashes:
    """Sorted distinct hashed token trigrams of a question."""
    return np.unique(ngram_hashes(tokens(normalise(question)), _SHINGLE))


def jaccard(left: Hashes, right: Hashes) -> float:
    """``|A and B| / |A or B|`` of two sorted sets."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def bands_for(threshold: float) -> tuple[int, int]:
    """Return ``(bands, rows)``: the longest bands whose probability of a collision at ``threshold`` is at least 99.9%.

    Two sets of similarity s collide in at least one of b bands of r rows with probability ``1 - (1 - s^r)^b``.
    """
    bandings = ((_PERMUTATIONS // rows, rows) for rows in range(_PERMUTATIONS, 0, -1))
    return next((bands, rows) for bands, rows in bandings if 1 - (1 - threshold**rows) ** bands >= _RECALL)


class NearDuplicates:
    """Finds records that repeat an earlier one, by MinHash.

    Memory: 8 bytes per record and band, and the shingles of colliding records.  ``threshold`` is the Jaccard
    similarity of token trigrams, in (0.3, 1].
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._bands, self._rows = bands_for(threshold)
        generator = np.random.default_rng(0x5EED)
        shape = (self._bands, self._rows, 1)
        self._multipliers = generator.integers(1, 2**63, shape, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = generator.integers(0, 2**63, shape, dtype=np.uint64)
        self._keys: list[Hashes] = []

    def add(self, record: Record) -> None:
        """Add the next record."""
        smallest = mix(shingles(record.question) * self._multipliers + self._offsets).min(axis=-1)  # [bands, rows]
        # What has to be equal goes into every band's key: others do not even collide.
        same = digest(repr((numbers(normalise(record.question)), normalise(record.answer))))
        key: Hashes = np.full(self._bands, same, dtype=np.uint64)
        for row in range(self._rows):
            key = mix(key ^ smallest[:, row])
        self._keys.append(key)

    def repeats(self, questions: Callable[[int], str]) -> dict[int, tuple[int, float]]:
        """Return ``{index: (earlier index, similarity)}`` of the records that repeat an earlier kept one.

        ``questions`` returns the question of an index in the order of :meth:`add`.
        """
        if not self._keys:
            return {}
        keys = np.stack(self._keys)
        shared = np.zeros(keys.shape, dtype=bool)  # keys that another record has too
        for band in range(self._bands):
            _, inverse, counts = np.unique(keys[:, band], return_inverse=True, return_counts=True)
            shared[:, band] = counts[inverse] > 1
        members: dict[tuple[int, int], list[int]] = {}
        sets: dict[int, Hashes] = {}
        found: dict[int, tuple[int, float]] = {}
        for index in np.flatnonzero(shared.any(axis=1)).tolist():
            mine = shingles(questions(index))
            bands = np.flatnonzero(shared[index]).tolist()
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


SHORTEST = 6  # words


@dataclass(frozen=True, slots=True)
class Overlap:
    """A passage of a training question that is also in an evaluation question."""

    dataset: str
    record: str
    passage: str


class EvaluationIndex:
    """Index of n-word passages of evaluation questions; ``n`` is at least :data:`SHORTEST`."""

    def __init__(self, records: Iterable[Record], n: int) -> None:
        self._owners: list[tuple[str, str]] = []
        self._whole: dict[int, int] = {}
        runs: dict[int, list[tuple[Hashes, int]]] = {}
        for owner, record in enumerate(records):
            self._owners.append((record.dataset, record.id))
            units = words(normalise(record.question))
            if not units:
                continue
            self._whole.setdefault(int(ngram_hashes(units, len(units))[0]), owner)
            if len(units) >= SHORTEST:
                length = min(n, len(units))
                runs.setdefault(length, []).append((ngram_hashes(units, length), owner))
        self._runs = {length: _sorted(found) for length, found in sorted(runs.items(), reverse=True)}

    def overlap(self, record: Record) -> Overlap | None:
        """Return the longest indexed passage in the question, the first of several; None if there is none."""
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
