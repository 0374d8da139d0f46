r"""Grade mathematical answers: numbers, words and choices at once, everything else by algebra in worker processes.

Three steps: :mod:`.extract` finds the final answer, :mod:`.normalise` gives it one spelling, :mod:`.equal` compares.
The rules are in docs/grading.md.
"""

import functools
import re
from collections.abc import Mapping, Sequence

from coca_mindspeed.data.records import Record, RecordError
from coca_mindspeed.grading.math.extract import final_answer, stated_formula, without_boxes
from coca_mindspeed.grading.math.normalise import Answer, read_answer
from coca_mindspeed.grading.math.plain import CHOICE, is_words, plain_text, verdict_without_algebra
from coca_mindspeed.grading.math.reading import Reading
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict
from coca_mindspeed.grading.workers import Failure, TaskResult, Workers
from coca_mindspeed.utils.process import usable_cpus
from coca_mindspeed.utils.progress import StepProgress

# Far above the answers of benchmarks; the cost of parsing grows much faster than the length.
MAX_ANSWER_CHARACTERS = 2_000
MAX_DEPTH = 50
# Longest answer that is read, unless the gold answer is longer; a batch of longer answers would take minutes.
_MAX_READ_CHARACTERS = 400
_MAX_WORKERS = 16
# Failures that the input may have caused; others are the machine's.
_INPUT_FAILURES = frozenset((Failure.TIMEOUT, Failure.DIED, Failure.RAISED))
_GOLDS_PER_PROGRESS_UPDATE = 2_000
_SILENT_SECONDS = 10.0
_SENTENCE = re.compile(r"^\s*####|^[^$\\\n]*\b(?:is|are|equals)\b[^$\\\n]*\d", re.MULTILINE)
_BRACKETS = re.compile(r"[{}()\[\]]")
_Pair = tuple[str, str | None, bool]  # gold answer, final answer, and whether joined numbers are computed
_Bodies = tuple[str, str, bool]


def _compare(bodies: _Bodies) -> tuple[Outcome, str]:
    # In the worker only: sympy is slow to import.
    from coca_mindspeed.grading.math.equal import compare

    return compare(bodies[:2], arithmetic=bodies[2])


_WARM_UP = functools.partial(_compare, (r"x^2+\frac{1}{2}", r"\sqrt{2}", False))


class MathGrader(TalliedGrader):
    r"""Grades by value, not by spelling. Not thread-safe.

    Args:
        seconds: processor time limit for one comparison; the worker that exceeds it is killed and replaced.
        workers: number of processes; None for one per core, at most 16.
        boxed_only: accept only answers in ``\boxed{}``.
    """

    def __init__(self, seconds: float = 5.0, workers: int | None = None, boxed_only: bool = False) -> None:
        count = min(_MAX_WORKERS, usable_cpus()) if workers is None else workers
        super().__init__()
        self._boxed_only = boxed_only
        self._gold_fails: dict[str, bool] = {}
        self._workers = Workers(count, seconds, warm_up=_WARM_UP)

    def check(self, records: Sequence[Record]) -> None:
        golds = list(dict.fromkeys(record.answer for record in records))
        problems: dict[str, str] = {}
        with StepProgress(len(golds), True, title="checking gold answers", patience=_SILENT_SECONDS) as progress:
            for start in range(0, len(golds), _GOLDS_PER_PROGRESS_UPDATE):
                chunk = golds[start : start + _GOLDS_PER_PROGRESS_UPDATE]
                problems.update(zip(chunk, self.gold_problems(chunk), strict=True))
                progress.show(len(problems))
        _refuse(records, problems)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade responses, or bare final answers; ``DataError`` for an empty, too long or too deep gold answer."""
        golds = {record.answer for record in records}
        _refuse(records, {gold: _unreadable(gold) or ("" if gold.strip() else "it is empty") for gold in golds})
        pairs = zip(records, answers, strict=True)
        return self._verdicts(
            [
                (record.answer, self._final(record.answer, answer), record.metadata.get("arithmetic") is True)
                for record, answer in pairs
            ]
        )

    def _final(self, gold: str, answer: str) -> str | None:
        """The final answer; a response that is the gold answer as it is written needs no reading: ``12 March 1990``."""
        if not self._boxed_only and answer.strip() == gold.strip():
            return gold
        return final_answer(answer, self._boxed_only)

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [final_answer(answer, self._boxed_only) for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two final answers of each pair are the same; undecided pairs are not."""
        # Sorted: the comparison depends on which side is the gold answer.
        return [verdict.correct for verdict in self._verdicts([(min(pair), max(pair), False) for pair in pairs])]

    def gold_problems(self, golds: Sequence[str]) -> list[str]:
        """For each gold answer, why it cannot be used, or ``""``: words, or mathematics that equals itself."""
        problems = {gold: _unreadable(gold) or ("" if gold.strip() else "it is empty") for gold in golds}
        parsed: dict[_Pair, _Bodies] = {}
        for gold in [gold for gold, problem in problems.items() if not problem]:
            wanted = _read(gold)
            text = plain_text(wanted.body)
            if _SENTENCE.search(gold):
                problems[gold] = "it is a worked solution or a sentence about a number"
            elif wanted.value is None and not is_words(text) and not CHOICE.fullmatch(text):
                parsed[gold, gold, False] = _bodies(wanted, wanted, arithmetic=False)
            if formula := stated_formula(gold):  # of a sentence that is readable as a whole
                parsed[gold, formula, False] = _bodies(_read(formula), _read(formula), arithmetic=False)
        for (gold, *_), verdict in self._symbolic_verdicts(parsed):
            if not verdict.correct:
                problems[gold] = verdict.reason or "it does not equal itself"
        return [problems[gold] for gold in golds]

    def metrics(self) -> dict[str, float]:
        self._counts["timeouts"], self._counts["restarts"] = self._workers.timeouts, self._workers.restarts
        return super().metrics()

    def close(self) -> None:
        self._workers.close()

    def _verdicts(self, pairs: Sequence[_Pair]) -> list[Verdict]:
        # Samples of a group often agree: each distinct pair is compared once.
        decided: dict[_Pair, Verdict] = {}
        symbolic: dict[_Pair, _Bodies] = {}
        for pair in dict.fromkeys(pairs):
            gold, final, arithmetic = pair
            if final is None:
                decided[pair] = Verdict(Outcome.WRONG, "no answer was found")
            elif problem := _unreadable(final) or _unreadable(gold):
                decided[pair] = Verdict(Outcome.WRONG, problem)
            elif len(final) > max(_MAX_READ_CHARACTERS, 4 * len(gold)):
                decided[pair] = Verdict(Outcome.WRONG, "it is far longer than the gold answer")
            else:
                formula = None if final.strip() == gold.strip() else stated_formula(gold)
                wanted, answer = _read(formula or gold), _read(final)
                if verdict := verdict_without_algebra(wanted, answer):
                    decided[pair] = verdict
                else:
                    symbolic[pair] = _bodies(wanted, answer, arithmetic)
        decided.update(self._symbolic_verdicts(symbolic))
        return [decided[pair] for pair in pairs]

    def _symbolic_verdicts(self, bodies: Mapping[_Pair, _Bodies]) -> list[tuple[_Pair, Verdict]]:
        unique = list(dict.fromkeys(bodies.values()))
        results = dict(zip(unique, self._workers.map(_compare, unique), strict=True))
        # Gold answers of failed comparisons are compared with themselves: do they fail without any other answer?
        failed = {gold for (gold, *_), result in results.items() if result.failure in _INPUT_FAILURES}
        untried = [gold for gold in failed if gold not in self._gold_fails]
        themselves = self._workers.map(_compare, [(gold, gold, False) for gold in untried])
        for gold, result in zip(untried, themselves, strict=True):
            if result.failure is None or result.failure in _INPUT_FAILURES:
                self._gold_fails[gold] = result.failure is not None
        return [(pair, self._verdict(body[0], results[body])) for pair, body in bodies.items()]

    def _verdict(self, gold: str, result: TaskResult[tuple[Outcome, str]]) -> Verdict:
        """The verdict of a comparison; a failure is the answer's fault unless the gold answer alone fails too."""
        if result.value is not None:
            outcome, reason = result.value
            return Verdict(outcome, reason, result.seconds)
        answers_fault = result.failure in _INPUT_FAILURES and not self._gold_fails.get(gold, True)
        outcome = Outcome.WRONG if answers_fault else Outcome.UNGRADABLE
        return Verdict(outcome, f"the comparison failed: {result.detail}", result.seconds)


def _read(text: str) -> Answer:
    return read_answer(without_boxes(text))


def _bodies(gold: Answer, answer: Answer, arithmetic: bool) -> _Bodies:
    """The text that algebra compares; a range of percentages is written, not computed."""
    is_written = not arithmetic and Reading.of(gold.body).as_written
    named = []
    for side in (gold, answer):
        body = rf"\frac{{{side.body}}}{{100}}" if side.percent and not is_written else side.body
        named.append(f"{side.name}={body}" if side.name else body)
    return named[0], named[1], arithmetic


def _refuse(records: Sequence[Record], problems: Mapping[str, str]) -> None:
    """Raise ``RecordError`` for the first record with a bad gold answer; the message counts all."""
    bad = [record for record in records if problems[record.answer]]
    if not bad:
        return
    more = f"; {len(bad)} of {len(records)} records have a bad gold answer" if len(bad) > 1 else ""
    raise RecordError(
        bad[0],
        f"the gold answer {bad[0].answer[:60]!r} cannot be used: {problems[bad[0].answer]}{more}. Expected the final "
        "answer alone: correct it, or prepare the original file with coca-mindspeed data prepare, which extracts the "
        "answer from a worked solution and drops records that cannot be graded",
    )


def _unreadable(text: str) -> str:
    """Why a text is not compared, or ``""``: long or deep texts cannot be parsed in reasonable time."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return f"it is over {MAX_ANSWER_CHARACTERS} characters"
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "{([" else -1
        if depth > MAX_DEPTH:
            return f"its brackets are more than {MAX_DEPTH} deep"
    return ""
