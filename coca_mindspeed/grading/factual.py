"""Short facts with known aliases (TriviaQA), compared after normalisation (:mod:`coca_mindspeed.data.facts`)."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal, get_args

from coca_mindspeed.data.facts import normalise_fact, without_thousands_commas
from coca_mindspeed.data.records import DASH, Record, RecordError, is_code, joins_numbers
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.math.extract import is_cut_off, last_boxed, last_tagged
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict
from coca_mindspeed.utils.characters import compatible

_PHRASE = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!false )(?<![^\W_])answer[*_]*(?:\s+is\b|\s*:|[*_]*\n)\s*:?", re.IGNORECASE
)

# Words that introduce a second candidate or withdraw the first one.
_HEDGING = """or nor not never neither no without except unless instead rather versus vs alternatively either otherwise
but cannot isn wasn aren weren doesn didn don won t wrong incorrect false maybe perhaps possibly unlikely other
actually hardly barely scarcely unlike excluding besides minus than"""
_HEDGES = frozenset(_HEDGING.split())
# Where one candidate of a list ends and the next begins.
_LIST = re.compile(r"[,、;:/|&()\[\]\n]|\s[-–—+]+\s|(?<=\w)\+(?=\w)|[.!?](?=\s|$)|\band\b", re.IGNORECASE)
_DISCOURSE = frozenset(("yes", "well", "ok", "okay", "so", "sure", "indeed", "certainly", "hence", "thus", "therefore"))
# Function words of sentences and long names; names side by side without any are a list.
_FUNCTIONAL = "it is was were are be by he she they we i in of on to for at from as this that his her"
_FUNCTION_WORDS = frozenset(_FUNCTIONAL.split())
_CANDIDATE_WORDS = 3

# Without a limit, a long enough answer would contain every alias; a longer gold answer is an explanation.
_MAX_WORDS = 30

# Words that an answer may add to those of its question; none of them can be another candidate.
_ADDED_WORDS = (_FUNCTION_WORDS | _DISCOURSE | {"called", "named", "known", "its", "their", "there", "s"}) - _HEDGES
_ENDINGS = ("", "s", "es", "d", "ed")

MatchRule = Literal["sentence", "exact", "contains"]


def stated_fact(answer: str) -> str:
    """The line with the answer: a box, else the text after the last "answer is", else the first non-blank line."""
    return _stated(answer)[0]


def _stated(answer: str) -> tuple[str, list[str]]:
    """The line with the answer, and the non-blank lines after it; none after a box."""
    answer = compatible(answer)
    if (tagged := last_tagged(answer)) is not None:
        answer = tagged
    if (boxed := last_boxed(answer)) is not None:
        return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", boxed).strip(), []
    if is_cut_off(answer):
        return "", []
    phrases = list(_PHRASE.finditer(answer))
    rest = answer[phrases[-1].end() :] if phrases else answer
    lines = [line.strip() for line in rest.splitlines() if normalise_fact(line)]
    return (lines[0], lines[1:]) if lines else ("", [])


class FactualGrader(TalliedGrader):
    """Compares with ``record.metadata["aliases"]``, or with ``record.answer`` alone.

    Args:
        match: ``exact``: the stated fact is an alias, alone on its line. ``sentence``: or a sentence that names one and
            otherwise repeats the question. ``contains``: or an alias occurs as whole words among at most 30, without
            denial or other candidates; closer to OpenCompass, and easier to guess.

    With all, a later line that names another candidate makes the answer wrong, and the case of a gold answer such as
    ``CO2`` counts, unless it has aliases.
    """

    def __init__(self, match: MatchRule = "sentence") -> None:
        if match not in get_args(MatchRule):
            raise GradingError(f"match should be one of {', '.join(get_args(MatchRule))}, found {match!r}")
        super().__init__()
        self._match = match

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        for record in records:
            aliases_of(record)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [self._graded(record, answer) for record, answer in zip(records, answers, strict=True)]

    def _graded(self, record: Record, answer: str) -> Verdict:
        aliases, code = aliases_of(record), ""
        if "aliases" not in record.metadata and (is_code(record.answer) or joins_numbers(record.answer)):
            aliases, answer = [_without_formatting(record.answer)], _without_formatting(answer)
            code = record.answer.strip() if is_code(record.answer) else ""
        verdict = self._verdict({*map(normalise_fact, aliases)} - {""}, record.question, answer)
        if verdict.correct and code and not _has_case_of(code, _stated(answer)[0]):
            return Verdict(Outcome.WRONG, "upper and lower case differ")
        return verdict

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [stated_fact(answer) or None for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [normalise_fact(first) == normalise_fact(second) != "" for first, second in pairs]

    def _verdict(self, aliases: set[str], question: str, answer: str) -> Verdict:
        fact, following = _stated(answer)
        whole = normalise_fact(fact)
        if not whole:
            return Verdict(Outcome.WRONG, "no answer was found")
        if whole not in aliases and not self._named(aliases, question, fact):
            return Verdict(Outcome.WRONG)
        if any(_is_candidate(line, aliases) for line in following):
            return Verdict(Outcome.WRONG, "another candidate follows")
        return Verdict(Outcome.RIGHT)

    def _named(self, aliases: set[str], question: str, fact: str) -> bool:
        if self._match == "exact":
            return False
        return _repeats_question(aliases, question, fact) or (self._match == "contains" and _contains(aliases, fact))


def _without_formatting(answer: str) -> str:
    r"""``\mathrm{CO}_2`` and ``CO₂`` are CO2; ``3 – 1`` and ``3--1`` are 3-1."""
    answer = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mathsf|ce)\s*\{([^{}]*)\}|\$", r"\1", compatible(answer))
    answer = re.sub(r"(?<=[A-Za-z)])\s*_\s*(?:\{\s*(\w+)\s*\}|(\w))", r"\1\2", answer)
    answer = re.sub(r"(?<=[A-Za-z])[₀-₉]+", lambda match: unicodedata.normalize("NFKC", match[0]), answer)
    return re.sub(rf"(?<=\d)\s*{DASH}\s*(?=\d)", "-", answer)


def _has_case_of(code: str, fact: str) -> bool:
    return {word for word in re.findall(r"[A-Za-z\d]+", fact) if word.lower() == code.lower()} == {code}


def names_answer(record: Record, answer: str) -> bool:
    """Whether an alias of the record, or its gold answer, occurs in an answer as whole words, whatever surrounds it."""
    return _longest_in(set(map(normalise_fact, aliases_of(record))) - {""}, f" {normalise_fact(answer)} ") is not None


def _longest_in(aliases: set[str], padded: str) -> str | None:
    """Return the longest alias in a text: "Paris, France" is no list if it is an alias itself."""
    return next((alias for alias in sorted(aliases, key=len, reverse=True) if f" {alias} " in padded), None)


def _repeats_question(aliases: set[str], question: str, fact: str) -> bool:
    """Whether a fact names an alias that the question does not, and its other words are the question's or say nothing.

    No candidate fits into such a sentence, unless the question names it.
    """
    asked, padded = normalise_fact(question).split(), f" {normalise_fact(fact)} "
    found = _longest_in(aliases, padded)
    if found is None or _longest_in(aliases, f" {' '.join(asked)} ") is not None:
        return False
    repeated = {word + ending for word in asked for ending in _ENDINGS} - _HEDGES
    others = padded.replace(f" {found} ", " ").split()  # of 3-1 in "3-1, 1-3" the second score is left
    return set(others) <= repeated | _ADDED_WORDS


def _contains(aliases: set[str], fact: str) -> bool:
    """Whether the first clause of a fact contains an alias, and the fact names nothing else and does not deny it."""
    padded = f" {normalise_fact(fact)} "
    if len(padded.split()) > _MAX_WORDS:
        return False
    found = _longest_in(aliases, padded)
    if found is None:
        return False
    around = padded.replace(f" {found} ", " ")
    if not _HEDGES.isdisjoint(around.split()):
        return False
    before, _, after = (side.split() for side in padded.partition(f" {found} "))
    if any(len(side) >= least and _FUNCTION_WORDS.isdisjoint(side) for side, least in ((before, 3), (after, 2))):
        return False
    named = set(found.split())
    clauses = [set(normalise_fact(clause).split()) for clause in _LIST.split(without_thousands_commas(fact))]
    first = next((words for words in clauses if not words <= _DISCOURSE or words & named), set())
    return bool(first & named) and not any(
        0 < len(words - _DISCOURSE) <= _CANDIDATE_WORDS and not words & named for words in clauses
    )


def _is_candidate(line: str, aliases: set[str]) -> bool:
    """True if a line after the answer is another answer or a correction, not a reason."""
    words = normalise_fact(line).split()
    if " ".join(words) in aliases or words == ["because"]:
        return False
    return len(words) <= _CANDIDATE_WORDS or words[0] in _HEDGES


def aliases_of(record: Record) -> list[str]:
    """The aliases of the gold answer, or itself; ``RecordError`` if nothing is left to compare with."""
    aliases = record.metadata.get("aliases", [record.answer])
    if not isinstance(aliases, list) or not aliases or not all(isinstance(alias, str) for alias in aliases):
        raise RecordError(record, f"metadata['aliases'] should be a list of at least one string, found {aliases!r:.80}")
    lengths = [len(normalise_fact(alias).split()) for alias in aliases]
    if not any(lengths):
        raise RecordError(record, f"metadata['aliases'] {aliases!r:.80} have only articles and punctuation")
    if min(filter(None, lengths)) > _MAX_WORDS:
        raise RecordError(
            record,
            f"the gold answer {aliases[0]!r:.80} has over {_MAX_WORDS} words, which no answer repeats; shorten it, or "
            "use the grader simpleqa",
        )
    return aliases
