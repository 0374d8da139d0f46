"""Is this mathematical answer right?  An exact path for numbers and words, math-verify for everything else.

The rules (units, percent signs, decimals, lists, ...) are settled in docs/grading.md, and by example in
tests/grading/math_pairs.tsv.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.final_answer import final_answer
from coca_mindspeed.grading.quantity import TEXT, Answer, assigned_number, read_answer, same_number, units_agree
from coca_mindspeed.grading.verdict import Outcome, Tally, Verdict
from coca_mindspeed.grading.workers import TaskResult, Workers

# No answer of a benchmark comes near; the cost of parsing grows much faster than the length.
MAX_ANSWER_CHARACTERS = 2_000
_MAX_WORKERS = 16

_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ ,'-]+[A-Za-z]+)*")
_MATH_WORDS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|arc\w+|log|ln|exp|sqrt|pi|inf|infinity|gcd|lcm|max|min|mod|and|or)\b", re.IGNORECASE
)
_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*\)?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*[^()]+")

_BASED = re.compile(r"([0-9A-Fa-f.]+)(?:\s*_\s*\{?\s*(\d{1,3})\s*\}?)?")

_RIGHT, _WRONG = Verdict(Outcome.RIGHT), Verdict(Outcome.WRONG)


def _compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    # Imported in the worker: the trainer's process neither needs sympy nor waits for it.
    from coca_mindspeed.grading.symbolic import compare

    return compare(pair)


def _gold_problem(text: str) -> str:
    from coca_mindspeed.grading.symbolic import gold_problem

    return gold_problem(text)


def _warm_up() -> None:
    from coca_mindspeed.grading.latex import warm_up

    warm_up()


class MathGrader:
    r"""Grades by value, not by spelling.

    Args:
        seconds: hard limit for one answer; the worker that passes it is killed and replaced.
        workers: number of processes; None for one a core, at most 16.
        boxed_only: an answer outside of ``\boxed{}`` is no answer.

    Not for use by several threads at once.
    """

    def __init__(self, seconds: float = 5.0, workers: int | None = None, boxed_only: bool = False) -> None:
        count = min(_MAX_WORKERS, len(os.sched_getaffinity(0))) if workers is None else workers
        self._boxed_only = boxed_only
        self._workers = Workers(count, seconds, warm_up=_warm_up)
        self._tally = Tally()

    def check(self, records: Sequence[Record]) -> None:
        """Any record can be graded; an answer whose gold one cannot be read is ungradable, and counted."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade responses, or bare final answers; see :class:`~coca_mindspeed.grading.verdict.Grader`."""
        started = time.perf_counter()
        finals = self.final_answers(answers)
        verdicts = self._verdicts([(record.answer, final) for record, final in zip(records, finals, strict=True)])
        self._tally.add(verdicts, time.perf_counter() - started)
        return verdicts

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [final_answer(answer, self._boxed_only) for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two final answers of each pair are the same; what cannot be decided is not."""
        # Sorted, because math-verify is not symmetric.
        return [verdict.correct for verdict in self._verdicts([(min(pair), max(pair)) for pair in pairs])]

    def gold_problems(self, golds: Sequence[str]) -> list[str]:
        """For each gold answer, why it cannot be used, or ``""``: to be asked when data is prepared."""
        problems: list[str | None] = []
        unread: list[str] = []
        for gold in golds:
            problem = _plain_gold_problem(gold)
            problems.append(problem)
            if problem is None:
                unread.append(read_answer(gold).body)
        unique = list(dict.fromkeys(unread))
        parsed = dict(zip(unique, self._workers.map(_gold_problem, unique), strict=True))
        return [
            _task_problem(parsed[read_answer(gold).body]) if problem is None else problem
            for gold, problem in zip(golds, problems, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        self._tally.timeouts = self._workers.timeouts
        self._tally.restarts = self._workers.restarts
        return self._tally.metrics()

    def close(self) -> None:
        self._workers.close()

    def _verdicts(self, pairs: Sequence[tuple[str, str | None]]) -> list[Verdict]:
        # The samples of a group often agree: each distinct pair is looked at once.
        decided: dict[tuple[str, str | None], Verdict] = {}
        symbolic: dict[tuple[str, str | None], tuple[str, str]] = {}
        golds = {gold: read_answer(gold[:MAX_ANSWER_CHARACTERS]) for gold, _ in pairs}
        for pair in dict.fromkeys(pairs):
            gold, final = pair
            if final is None:
                decided[pair] = Verdict(Outcome.WRONG, "no answer was found")
            elif len(final) > MAX_ANSWER_CHARACTERS or len(gold) > MAX_ANSWER_CHARACTERS:
                which = "answer" if len(final) > MAX_ANSWER_CHARACTERS else "gold answer"
                decided[pair] = Verdict(Outcome.UNGRADABLE, f"the {which} is over {MAX_ANSWER_CHARACTERS} characters")
            else:
                answer = read_answer(final)
                verdict = plain_verdict(golds[gold], answer)
                if verdict is None:
                    symbolic[pair] = (golds[gold].body, answer.body)
                else:
                    decided[pair] = verdict
        decided.update(self._symbolic_verdicts(symbolic))
        return [decided[pair] for pair in pairs]

    def _symbolic_verdicts(
        self, bodies: Mapping[tuple[str, str | None], tuple[str, str]]
    ) -> Iterable[tuple[tuple[str, str | None], Verdict]]:
        unique = list(dict.fromkeys(bodies.values()))
        verdicts = dict(zip(unique, map(_verdict, self._workers.map(_compare, unique)), strict=True))
        return [(pair, verdicts[body]) for pair, body in bodies.items()]


def _verdict(result: TaskResult[tuple[Outcome, str]]) -> Verdict:
    if result.value is None:
        return Verdict(Outcome.UNGRADABLE, f"the comparison failed: {result.detail}", result.seconds)
    outcome, reason = result.value
    return Verdict(outcome, reason, result.seconds)


def _task_problem(result: TaskResult[str]) -> str:
    return f"it cannot be parsed: {result.detail}" if result.value is None else result.value


def _plain_gold_problem(gold: str) -> str | None:
    """Why a gold answer is bad, ``""`` if the exact path can use it, None if the parser has to be asked."""
    if len(gold) > MAX_ANSWER_CHARACTERS:
        return f"it is over {MAX_ANSWER_CHARACTERS} characters"
    answer = read_answer(gold)
    if not answer.body:
        return "it is empty"
    plain = answer.value is not None or assigned_number(answer) or _is_words(answer.body) or _choice(answer.body)
    return "" if plain else None


def plain_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """Right or wrong where that can be said without algebra, None where it cannot."""
    if not answer.body or not gold.body:
        return Verdict(Outcome.UNGRADABLE, "the gold answer is empty") if not gold.body else _WRONG
    if not units_agree(gold, answer):
        return Verdict(Outcome.WRONG, f"the unit is {answer.unit}, not {gold.unit}")
    if gold.value is not None and answer.value is not None:
        return _RIGHT if same_number(gold, answer) else _WRONG
    if (bases := _base_verdict(gold.body, answer.body)) is not None:
        return bases
    if gold.percent == answer.percent and _spelling(gold.body) == _spelling(answer.body):
        return _RIGHT
    if (verdict := _assigned_verdict(gold, answer)) is not None:
        return verdict
    if choice := _choice(gold.body):
        return _choice_verdict(choice, answer.body)
    if _is_words(gold.body):
        return _RIGHT if _words(gold.body) == _words(answer.body) else _WRONG
    if _is_words(answer.body) and gold.value is not None:
        return _WRONG
    return None


def _assigned_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """``x = 5`` against ``5``, either way round; two assignments are left to algebra, which sees the variables."""
    if gold.value is not None and (given := assigned_number(answer)) is not None:
        return _RIGHT if same_number(gold, given) else _WRONG
    if answer.value is not None and (wanted := assigned_number(gold)) is not None:
        return _RIGHT if same_number(wanted, answer) else _WRONG
    return None


def _base_verdict(gold: str, answer: str) -> Verdict | None:
    """``1011_2``: the same digits and the same base; a base that one side leaves out is the other's."""
    match, other = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if match is None or other is None or (match[2] is None and other[2] is None):
        return None
    same_base = match[2] is None or other[2] is None or int(match[2]) == int(other[2])
    return _RIGHT if same_base and match[1].lower() == other[1].lower() else _WRONG


def _spelling(body: str) -> str:
    return re.sub(r"\\[dtc]frac", r"\\frac", body).replace(" ", "")


def _is_words(body: str) -> bool:
    return _WORDS.fullmatch(body) is not None and _MATH_WORDS.search(body) is None


def _words(body: str) -> str:
    return re.sub(r"[^a-z]+", " ", body.casefold()).strip()


def _choice(body: str) -> str | None:
    match = _CHOICE.fullmatch(body)
    return match[1] if match else None


def _choice_verdict(gold: str, body: str) -> Verdict | None:
    """A single letter, as of a multiple choice: the same letter, alone or before its option's text."""
    body = re.sub(TEXT, r"\1", body)
    given = _choice(body)
    if given is None and (match := _CHOICE_WITH_TEXT.fullmatch(body)):
        given = match[1] or match[2]
    if given is None:
        return None
    return _RIGHT if given == gold else _WRONG
