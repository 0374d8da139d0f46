"""Is this mathematical answer right?  An exact path for numbers and words, math-verify for everything else.

The rules (units, percent signs, decimals, lists, ...) are settled in docs/grading.md, and by example in
tests/grading/math_pairs.tsv.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from coca_mindspeed.cpus import usable_cpus
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.mathematics.final_answer import final_answer, is_cut_off
from coca_mindspeed.grading.mathematics.notation import same_digits, same_ratio
from coca_mindspeed.grading.mathematics.quantity import Answer, assigned_number, read_answer, same_number, units_agree
from coca_mindspeed.grading.verdict import Outcome, Tally, Verdict
from coca_mindspeed.grading.words import choice, chosen, is_phrase, is_words, plain_text, same_words
from coca_mindspeed.grading.workers import TaskResult, Workers

# No answer of a benchmark comes near; the cost of parsing grows much faster than the length.
MAX_ANSWER_CHARACTERS = 2_000
MAX_DEPTH = 50
# Of an answer that has to be parsed: no other form of a short gold answer is longer, and a batch of such would take
# the workers minutes.
_MAX_PARSED_CHARACTERS = 400
_MAX_WORKERS = 16

_BRACKETS = re.compile(r"[{}()\[\]]")

_RIGHT, _WRONG = Verdict(Outcome.RIGHT), Verdict(Outcome.WRONG)


def _compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    # Imported in the worker: the trainer's process neither needs sympy nor waits for it.
    from coca_mindspeed.grading.mathematics.symbolic import compare

    return compare(pair)


def _gold_problem(text: str) -> str:
    from coca_mindspeed.grading.mathematics.symbolic import gold_problem

    return gold_problem(text)


def _warm_up() -> None:
    from coca_mindspeed.grading.mathematics.latex import warm_up

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
        count = min(_MAX_WORKERS, usable_cpus()) if workers is None else workers
        self._boxed_only = boxed_only
        self._workers = Workers(count, seconds, warm_up=_warm_up)
        self._tally = Tally()

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        """See :class:`~coca_mindspeed.grading.verdict.MeasuredGrader`: no gold answer is empty, too long or too deep.

        An answer whose gold one cannot be parsed is ungradable, and counted.
        """
        problems: dict[str, str] = {}
        for record in records:
            if record.answer not in problems:
                problem = _unreadable(record.answer)
                problems[record.answer] = problem or ("" if record.answer.strip() else "it is empty")
            if problem := problems[record.answer]:
                raise DataError(
                    f"record {record.id!r} of {record.dataset!r}: the gold answer {record.answer[:60]!r} cannot be "
                    f"used: {problem}"
                )

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade responses, or bare final answers; see :class:`~coca_mindspeed.grading.verdict.Grader`.

        Raises:
            DataError: a gold answer is empty, too long or too deeply nested; nothing has been graded then.
        """
        started = time.perf_counter()
        self.check(records)
        finals = self.final_answers(answers)
        verdicts = self._verdicts([(record.answer, final) for record, final in zip(records, finals, strict=True)])
        for index, (final, answer) in enumerate(zip(finals, answers, strict=True)):
            if final is None and is_cut_off(answer):
                verdicts[index] = Verdict(Outcome.UNGRADABLE, "its box is never closed")
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
            elif problem := _unreadable(gold) or _unreadable(final):
                decided[pair] = Verdict(Outcome.WRONG, problem)
            else:
                answer = read_answer(final)
                verdict = plain_verdict(golds[gold], answer)
                if verdict is not None:
                    decided[pair] = verdict
                elif len(answer.body) > max(_MAX_PARSED_CHARACTERS, 2 * len(golds[gold].body)):
                    decided[pair] = Verdict(Outcome.WRONG, "it is far longer than the gold answer")
                else:
                    symbolic[pair] = (golds[gold].body, answer.body)
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


def _unreadable(text: str) -> str:
    """Why a text is not even looked at, or ``""``: what is too long or too deep cannot be parsed in reasonable time."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return f"it is over {MAX_ANSWER_CHARACTERS} characters"
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "{([" else -1
        if depth > MAX_DEPTH:
            return f"its brackets are more than {MAX_DEPTH} deep"
    return ""


def _plain_gold_problem(gold: str) -> str | None:
    """Why a gold answer is bad, ``""`` if the exact path can use it, None if the parser has to be asked."""
    if problem := _unreadable(gold):
        return problem
    answer = read_answer(gold)
    if not answer.body:
        return "it is empty"
    text = plain_text(answer.body)
    if answer.value is not None or assigned_number(answer):
        return ""
    return "" if is_words(text) or is_phrase(text) or choice(text) else None


def plain_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """Right or wrong where that can be said without algebra, None where it cannot."""
    if not answer.body or not gold.body:
        return Verdict(Outcome.UNGRADABLE, "the gold answer is empty") if not gold.body else _WRONG
    if not units_agree(gold, answer):
        return Verdict(Outcome.WRONG, f"the unit is {answer.unit}, not {gold.unit}")
    if (ratio := same_ratio(gold.body, answer.body)) is not None:
        return _RIGHT if ratio else _WRONG
    if gold.value is not None and answer.value is not None:
        return _RIGHT if same_number(gold, answer) else _WRONG
    if (digits := same_digits(gold.body, answer.body)) is not None:
        return _RIGHT if digits else _WRONG
    if gold.percent == answer.percent and _spelling(gold.body) == _spelling(answer.body):
        # "no on" is not "noon", but "x y" is "xy".
        words = is_words(gold.body) and is_words(answer.body)
        return _RIGHT if not words or same_words(gold.body, answer.body) else _WRONG
    if (verdict := _assigned_verdict(gold, answer)) is not None:
        return verdict
    return _verbal_verdict(gold, answer)


def _verbal_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    wanted, given = plain_text(gold.body), plain_text(answer.body)
    if letter := choice(wanted):
        chose = chosen(given)
        return None if chose is None else _RIGHT if chose == letter else _WRONG
    if is_words(wanted) or (gold.value is None and is_phrase(wanted)):
        return _RIGHT if same_words(wanted, given) else _WRONG
    if is_words(given) and gold.value is not None:
        return _WRONG
    return None


def _assigned_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """``x = 5`` against ``5``, either way round; two assignments are left to algebra, which sees the variables."""
    if gold.value is not None and (given := assigned_number(answer)) is not None:
        return _RIGHT if same_number(gold, given) else _WRONG
    if answer.value is not None and (wanted := assigned_number(gold)) is not None:
        return _RIGHT if same_number(wanted, answer) else _WRONG
    return None


def _spelling(body: str) -> str:
    # Two digits with a blank between them are two numbers.
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\\[dtc]frac", r"\\frac", body))
