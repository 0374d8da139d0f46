"""Filters of preparation: difficulty, source, prompt length, repeated and evaluation questions.

Repeated questions and passages are found by 64-bit hashes that depend on the text alone, so results are the same on
every machine.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coca_mindspeed.data.prompts import encode_prompts, prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.utils.characters import compatible
from coca_mindspeed.utils.tokenization import load_tokenizer

#: Returns why a record is dropped, or None to keep it.  Reasons are counted, so they name no single record.
Filter = Callable[[Record], str | None]


def by_difficulty(low: float, high: float, *, keep_unknown: bool = False) -> Filter:
    """Keep records whose ``metadata["difficulty"]`` is in ``[low, high]``; 0 is easiest."""

    def keep(record: Record) -> str | None:
        difficulty = record.metadata.get("difficulty")
        if difficulty is None:
            return None if keep_unknown else "unknown"
        return f"below {low:g}" if difficulty < low else f"above {high:g}" if difficulty > high else None

    return keep


def by_source(include: Collection[str], exclude: Collection[str]) -> Filter:
    """Keep records whose ``metadata["source"]`` is in ``include`` (empty: any) and not in ``exclude``."""

    def keep(record: Record) -> str | None:
        source = str(record.metadata.get("source", "unknown"))
        return source if source in exclude or (include and source not in include) else None

    return keep


def by_length(count: Callable[[Record], int], longest: int) -> Filter:
    """Keep records whose whole prompt has at most ``longest`` tokens, as ``count`` counts them."""
    return lambda record: f"prompt longer than {longest} tokens" if count(record) > longest else None


def prompt_counter(directory: Path, system_prompt: str | None) -> Callable[[Record], int]:
    """Count the tokens of a record's prompt; without a chat template, of the messages' texts."""
    tokenizer = load_tokenizer(directory)

    def count(record: Record) -> int:
        if tokenizer.chat_template is not None:
            return len(encode_prompts(tokenizer, [record], system_prompt)[0])
        messages = prompt_messages(record, system_prompt)
        return sum(len(tokenizer.encode(m["content"], add_special_tokens=False)) for m in messages)

    return count


#: For each record, why its gold answer cannot be graded, or an empty string.
LabelChecker = Callable[[Sequence[Record]], Sequence[str]]

Hashes = npt.NDArray[np.uint64]

# Scripts without spaces (kana, CJK, hangul) are cut into characters, all others into words.
_SCRIPT = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_SCRIPT}]|[^\W_{_SCRIPT}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: odd, well mixed


def normalise_text(text: str) -> str:
    """Compatible characters, case folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", compatible(text)).casefold().split())


def words(text: str) -> list[str]:
    """Words of a normalised text, without symbols; here x² is x2, to find more copies."""
    return _WORDS.findall(unicodedata.normalize("NFKC", text))


def digest(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


_word_hash = lru_cache(maxsize=1 << 17)(digest)


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


class ExactDuplicates:
    """Finds repeated questions by a 64-bit hash of their normalised text."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}

    def first(self, record: Record, index: int) -> tuple[int, bool] | None:
        """Return ``(index of the record with this question, whether the gold answers are equal)``, or None."""
        answer = digest(normalise_text(record.answer))
        known = self._first.setdefault(digest(normalise_text(record.question)), (index, answer))
        return None if known[0] == index else (known[0], known[1] == answer)


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
            units = words(normalise_text(record.question))
            if not units:
                continue
            self._whole.setdefault(int(ngram_hashes(units, len(units))[0]), owner)
            if len(units) >= SHORTEST:
                length = min(n, len(units))
                runs.setdefault(length, []).append((ngram_hashes(units, length), owner))
        self._runs = {length: _sorted(found) for length, found in sorted(runs.items(), reverse=True)}

    def overlap(self, record: Record) -> Overlap | None:
        """Return the longest indexed passage in the question, the first of several; None if there is none."""
        units = words(normalise_text(record.question))
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
