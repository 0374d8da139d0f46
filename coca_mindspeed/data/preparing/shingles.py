"""Text as sets of hashed n-grams: what near-duplicate search and decontamination compare.

Hashes are 64-bit and depend on nothing but the text, so results are the same on every machine and in every run.
"""

import re
import unicodedata
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

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
    """Unicode compatibility form, case folded, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """The words of a normalised text, without symbols."""
    return _WORDS.findall(text)


def tokens(text: str) -> list[str]:
    """The words and symbols of a normalised text."""
    return _TOKENS.findall(text)


def numbers(text: str) -> tuple[str, ...]:
    """The numbers of a normalised text, sorted, repeats kept."""
    return tuple(sorted(_NUMBERS.findall(text)))


def digest(text: str) -> int:
    """A 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=1 << 17)
def _word_hash(word: str) -> int:
    return digest(word)


def mix(values: Hashes) -> Hashes:
    """Spread 64-bit values over all bits (the finaliser of MurmurHash3); equal values stay equal."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def ngram_hashes(units: list[str], n: int) -> Hashes:
    """Hashes of the n-grams of ``units`` in order, shape ``[len(units) - n + 1]``, or of the whole if it is shorter.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n < 1:
        raise ValueError(f"n should be positive, found {n}")
    hashes = np.fromiter(map(_word_hash, units), dtype=np.uint64, count=len(units))
    if not units:
        return hashes
    n = min(n, len(units))
    # A polynomial in an odd base, modulo 2^64: order counts, and every word reaches every bit through the last mix.
    base = np.full(n, _MULTIPLIER, dtype=np.uint64)
    base[0] = 1
    return mix(np.lib.stride_tricks.sliding_window_view(hashes, n) @ np.multiply.accumulate(base))
