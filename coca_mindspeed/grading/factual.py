"""Short facts with known aliases (TriviaQA): right if the answer is one of them, after the usual normalisation.

Normalisation, as in TriviaQA's own evaluation: lower case; underscores, punctuation and quotation marks become
spaces; the articles a, an and the go; white space is one space.
"""

import re
import string
import time
from collections.abc import Sequence
from typing import Literal

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.final_answer import last_boxed
from coca_mindspeed.grading.verdict import Outcome, Tally, Verdict

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`“”", " "))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PHRASE = re.compile(r"answer(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s)")

# A fact is short.  Without this, an answer that lists everything would contain every alias.
_MAX_WORDS_AROUND = 30

MatchRule = Literal["exact", "contains"]


def normalise(text: str) -> str:
    """TriviaQA's normal form of an answer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def stated_fact(answer: str) -> str:
    r"""The line that holds the answer: a box, or what follows the last "answer is", or the first line with text."""
    if (boxed := last_boxed(answer)) is not None:
        return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", boxed).strip()
    phrases = list(_PHRASE.finditer(answer))
    rest = answer[phrases[-1].end() :] if phrases else answer
    return next((line.strip() for line in rest.splitlines() if normalise(line)), "")


class FactualGrader:
    """Compares with ``record.metadata["aliases"]``.

    Args:
        match: ``exact``: the stated fact, or its first sentence, is an alias.  ``contains``: an alias stands in it, as
            whole words, among at most 30 words; nearer to OpenCompass, and easier to satisfy by listing guesses.
    """

    def __init__(self, match: MatchRule = "exact") -> None:
        if match not in ("exact", "contains"):
            raise GradingError(f"match should be 'exact' or 'contains', found {match!r}")
        self._match = match
        self._tally = Tally()

    def check(self, records: Sequence[Record]) -> None:
        """See :class:`~coca_mindspeed.grading.verdict.MeasuredGrader`: every record has its aliases."""
        for record in records:
            aliases_of(record)

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """See :class:`~coca_mindspeed.grading.verdict.Grader`.

        Raises:
            DataError: a record has no aliases.
        """
        started = time.perf_counter()
        verdicts = [
            self._verdict({normalise(alias) for alias in aliases_of(record)}, stated_fact(answer))
            for record, answer in zip(records, answers, strict=True)
        ]
        self._tally.add(verdicts, time.perf_counter() - started)
        return verdicts

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [stated_fact(answer) or None for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [normalise(first) == normalise(second) != "" for first, second in pairs]

    def metrics(self) -> dict[str, float]:
        return self._tally.metrics()

    def close(self) -> None:
        """Nothing is held."""

    def _verdict(self, aliases: set[str], fact: str) -> Verdict:
        whole = normalise(fact)
        if not whole:
            return Verdict(Outcome.WRONG, "no answer was found")
        if self._match == "contains":
            padded = f" {whole} "
            near = len(whole.split()) <= _MAX_WORDS_AROUND
            right = near and any(f" {alias} " in padded for alias in aliases if alias)
        else:
            right = whole in aliases or normalise(_SENTENCE_END.split(fact, maxsplit=1)[0]) in aliases - {""}
        return Verdict(Outcome.RIGHT if right else Outcome.WRONG)


def aliases_of(record: Record) -> list[str]:
    """The names of the gold answer.

    Raises:
        DataError: there is none.
    """
    aliases = record.metadata.get("aliases")
    if not isinstance(aliases, list) or not aliases or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(
            f"record {record.id!r} of {record.dataset!r}: metadata['aliases'] should be a list of at least one string, "
            f"found {aliases!r:.80}"
        )
    return aliases
