r"""Grade mathematical answers: numbers, words and choices at once, everything else by algebra in worker processes.

Three stages: :mod:`.extract` finds the final answer, :mod:`.normalise` gives it one spelling, :mod:`.equal` compares.
The rules are in docs/grading.md, and by example in tests/grading/math_pairs.tsv.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from coca_mindspeed.data.records import Record, RecordError
from coca_mindspeed.grading.mathematics.extract import final_answer, is_cut_off, without_boxes
from coca_mindspeed.grading.mathematics.normalise import Answer, is_words, plain_text, read_answer
from coca_mindspeed.grading.mathematics.units import same_unit
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict
from coca_mindspeed.grading.workers import Failure, TaskResult, Workers
from coca_mindspeed.utils.eta import SlowProgress
from coca_mindspeed.utils.limits import usable_cpus

# Far above the answers of benchmarks; the cost of parsing grows much faster than the length.
MAX_ANSWER_CHARACTERS = 2_000
MAX_DEPTH = 50
# Of an answer that has to be parsed, unless the gold answer is longer: a batch of longer ones would take minutes.
_MAX_PARSED_CHARACTERS = 400
_MAX_WORKERS = 16

# Failures that the input may have caused; others are the machine's.
_INPUT_FAILURES = frozenset((Failure.TIMEOUT, Failure.DIED, Failure.RAISED))
_SHOWN_PROBLEMS = 3
_GOLDS_PER_PROGRESS_UPDATE = 2_000

_WORKED_SOLUTION = re.compile(r"^\s*####", re.MULTILINE)  # as GSM8K's solutions end
_BRACKETS = re.compile(r"[{}()\[\]]")

_RIGHT, _WRONG = Verdict(Outcome.RIGHT), Verdict(Outcome.WRONG)


def _compare(pair: tuple[str, str]) -> tuple[Outcome, str]:
    # In the worker only: sympy is slow to import.
    from coca_mindspeed.grading.mathematics.equal import compare

    return compare(pair)


def _gold_problem(text: str) -> str:
    from coca_mindspeed.grading.mathematics.equal import gold_problem

    return gold_problem(text)


def _warm_up() -> None:
    _compare((r"x^2+\frac{1}{2}", r"\sqrt{2}"))


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
        self._workers = Workers(count, seconds, warm_up=_warm_up)

    def check(self, records: Sequence[Record]) -> None:
        golds = list(dict.fromkeys(record.answer for record in records))
        problems: dict[str, str] = {}
        progress = SlowProgress("checking gold answers", len(golds))
        for start in range(0, len(golds), _GOLDS_PER_PROGRESS_UPDATE):
            chunk = golds[start : start + _GOLDS_PER_PROGRESS_UPDATE]
            problems.update(zip(chunk, self.gold_problems(chunk), strict=True))
            progress.show(len(problems))
        _refuse(records, problems)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade responses, or bare final answers; ``DataError`` for an empty, too long or too deep gold answer."""
        golds = {record.answer for record in records}
        _refuse(records, {gold: _unreadable(gold) or ("" if gold.strip() else "it is empty") for gold in golds})
        finals = self.final_answers(answers)
        verdicts = self._verdicts([(record.answer, final) for record, final in zip(records, finals, strict=True)])
        for index, (final, answer) in enumerate(zip(finals, answers, strict=True)):
            if final is None and is_cut_off(answer):
                verdicts[index] = Verdict(Outcome.WRONG, "its box is never closed")
        return verdicts

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [final_answer(answer, self._boxed_only) for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two final answers of each pair are the same; undecided pairs are not."""
        # Sorted: the comparison depends on which side is the gold answer.
        return [verdict.correct for verdict in self._verdicts([(min(pair), max(pair)) for pair in pairs])]

    def gold_problems(self, golds: Sequence[str]) -> list[str]:
        """For each gold answer, why it cannot be used, or ``""``."""
        problems: dict[str, str] = {}
        bodies: dict[str, str] = {}
        for gold in dict.fromkeys(golds):
            problem = _plain_gold_problem(gold)
            if problem is None:
                bodies[gold] = _read(gold).body
            else:
                problems[gold] = problem
        unique = list(dict.fromkeys(bodies.values()))
        parsed = {
            body: f"it cannot be parsed and compared: {result.detail}" if result.value is None else result.value
            for body, result in zip(unique, self._workers.map(_gold_problem, unique), strict=True)
        }
        problems.update({gold: parsed[body] for gold, body in bodies.items()})
        return [problems[gold] for gold in golds]

    def metrics(self) -> dict[str, float]:
        self._tally.timeouts = self._workers.timeouts
        self._tally.restarts = self._workers.restarts
        return super().metrics()

    def close(self) -> None:
        self._workers.close()

    def _verdicts(self, pairs: Sequence[tuple[str, str | None]]) -> list[Verdict]:
        # Samples of a group often agree: each distinct pair is compared once.
        decided: dict[tuple[str, str | None], Verdict] = {}
        symbolic: dict[tuple[str, str | None], tuple[str, str]] = {}
        golds = {gold: _read(gold[:MAX_ANSWER_CHARACTERS]) for gold, _ in pairs}
        for pair in dict.fromkeys(pairs):
            gold, final = pair
            if final is None:
                decided[pair] = Verdict(Outcome.WRONG, "no answer was found")
            elif problem := _unreadable(final):
                decided[pair] = Verdict(Outcome.WRONG, problem)
            elif problem := _unreadable(gold):
                decided[pair] = Verdict(Outcome.UNGRADABLE, f"the gold answer: {problem}")
            else:
                answer = _read(final)
                verdict = plain_verdict(golds[gold], answer)
                if verdict is not None:
                    decided[pair] = verdict
                elif len(answer.body) > max(_MAX_PARSED_CHARACTERS, 2 * len(golds[gold].body)):
                    decided[pair] = Verdict(Outcome.WRONG, "it is far longer than the gold answer")
                else:
                    symbolic[pair] = (_named_body(golds[gold]), _named_body(answer))
        decided.update(self._symbolic_verdicts(symbolic))
        return [decided[pair] for pair in pairs]

    def _symbolic_verdicts(
        self, bodies: Mapping[tuple[str, str | None], tuple[str, str]]
    ) -> Iterable[tuple[tuple[str, str | None], Verdict]]:
        unique = list(dict.fromkeys(bodies.values()))
        results = dict(zip(unique, self._workers.map(_compare, unique), strict=True))
        self._try_golds({gold for (gold, _), result in results.items() if result.failure in _INPUT_FAILURES})
        verdicts = {body: self._verdict(body[0], result) for body, result in results.items()}
        return [(pair, verdicts[body]) for pair, body in bodies.items()]

    def _try_golds(self, golds: Iterable[str]) -> None:
        """Compare new gold answers with themselves, to know whether they fail without any other answer."""
        untried = [gold for gold in golds if gold not in self._gold_fails]
        for gold, result in zip(untried, self._workers.map(_compare, [(gold, gold) for gold in untried]), strict=True):
            if result.failure is None or result.failure in _INPUT_FAILURES:
                self._gold_fails[gold] = result.failure is not None

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


def _named_body(answer: Answer) -> str:
    return f"{answer.name}={answer.body}" if answer.name else answer.body


def _refuse(records: Sequence[Record], problems: Mapping[str, str]) -> None:
    """Raise ``RecordError`` for the first record with a bad gold answer; the message counts all."""
    bad = [record for record in records if problems[record.answer]]
    if not bad:
        return
    more = f"; {len(bad)} of {len(records)} records have a bad gold answer" if len(bad) > 1 else ""
    if others := list(dict.fromkeys(record.answer for record in bad if record.answer != bad[0].answer)):
        more += f", for example {', '.join(f'{gold[:60]!r}' for gold in others[:_SHOWN_PROBLEMS])}"
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


def _plain_gold_problem(gold: str) -> str | None:
    """Why a gold answer is bad; ``""`` if the exact path can use it; None if it has to be parsed."""
    if problem := _unreadable(gold):
        return problem
    if _WORKED_SOLUTION.search(gold):
        return "it is a worked solution"
    answer = _read(gold)
    if not answer.body:
        return "it is empty"
    text = plain_text(answer.body)
    return "" if answer.value is not None or is_words(text) or _CHOICE.fullmatch(text) else None


# ------------------------------------------------------------------------------------------------ without algebra

_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-H])\s*\)|([A-H])[).:])\s*(.+)")
# The option's text must not name another choice.
_OTHER_CHOICE = re.compile(
    r"\(\s*[A-H]\s*\)|(?<![A-Za-z\\])[A-H](?=[).:,;/|]|$| (?:and|or)\b)|[,;|/]\s*[A-H](?![A-Za-z])|[,;|]\s*[a-df-h]\s*$|^[,;|/&]"
)
_WITHDRAWN = re.compile(r"\b(?:or|and) [A-H]\b|^(?:is|isn't|or|and|maybe|perhaps)\b|^[B-H]\b|^A$", re.IGNORECASE)
_TERM = r"\d+(?:\.\d+)?"
_RATIO = re.compile(rf"{_TERM}(?: ?: ?{_TERM}){{1,7}}")
_AS_FRACTION = re.compile(rf"\\frac ?\{{ ?({_TERM}) ?\}} ?\{{ ?({_TERM}) ?\}}|({_TERM}) ?/ ?({_TERM})")
_DIGITS = re.compile(r"([0-9A-Fa-f.]+)(?:\s*_\s*\{?\s*(\d{1,2})\s*\}?)?")
_PRODUCT = re.compile(r"-?[a-zA-Z](?:(?: *(?:\\cdot|\\times|\*) *| )[a-zA-Z]){1,5}")
_LETTERS = re.compile(r"-?[a-zA-Z]{2,6}")
_ROUNDED = Fraction(1, 10**6)  # relative error of a gold answer that is a rounded decimal
_DOUBLE = 15  # significant digits of a program's output, which is as good as the exact value


def plain_verdict(gold: Answer, answer: Answer) -> Verdict | None:
    """The verdict on two answers without algebra, or None if it takes some."""
    if not answer.body or not gold.body:
        return Verdict(Outcome.UNGRADABLE, "the gold answer is empty") if not gold.body else _WRONG
    if not same_unit(gold.unit, answer.unit):
        return Verdict(Outcome.WRONG, f"the unit is {answer.unit}, not {gold.unit}")
    found = None
    if gold.value is not None and answer.value is not None:
        found = (not gold.name or not answer.name or gold.name == answer.name) and same_number(gold, answer)
    for compare in (_same_ratio, _same_digits, _same_letters, _same_spelling, _same_choice, _same_words):
        found = compare(gold, answer) if found is None else found
    return None if found is None else _RIGHT if found else _WRONG


def same_number(gold: Answer, answer: Answer) -> bool:
    """Compare two numbers by the rules of docs/grading.md for decimals and percent signs."""
    assert gold.value is not None
    assert answer.value is not None
    if gold.percent == answer.percent or _asked_in_percent(answer if gold.percent else gold):
        if _close(gold, answer, gold.value, answer.value):
            return True
    if gold.percent == answer.percent:
        return False
    percent = Fraction(100)
    return _close(gold, answer, gold.value / percent**gold.percent, answer.value / percent**answer.percent)


def _asked_in_percent(plain: Answer) -> bool:
    """Whether a number without the sign may be meant in percent: 50 or 62.5, but not .125 and not 1/8."""
    return abs(plain.value or 0) >= 1 and re.fullmatch(r"[-+]?\s*[\d.]+", plain.body) is not None


def _close(gold: Answer, answer: Answer, a: Fraction, b: Fraction) -> bool:
    if a == b:
        return True
    # Only a value without a finite decimal form may be rounded.
    if gold.decimals and not answer.decimals and not _terminates(b):
        return abs(a - b) <= _ROUNDED * abs(a)
    return answer.decimals >= _DOUBLE and not _terminates(a) and abs(a - b) <= abs(a) / 10 ** (_DOUBLE - 1)


def _terminates(value: Fraction) -> bool:
    return (10 ** value.denominator.bit_length()) % value.denominator == 0


def _same_ratio(gold: Answer, answer: Answer) -> bool | None:
    """``3:4`` or ``12:30``: the same terms, or one fraction of them; None if neither side is a ratio of numbers."""
    if ":" not in gold.body and ":" not in answer.body:
        return None
    wanted, given = _ratio_terms(gold.body), _ratio_terms(answer.body)
    if (wanted is None and ":" in gold.body) or (given is None and ":" in answer.body):
        return True if gold.body.replace(" ", "") == answer.body.replace(" ", "") else None
    return wanted is not None and wanted == given


def _ratio_terms(body: str) -> list[Fraction] | None:
    if _RATIO.fullmatch(body):
        return [Fraction(term) for term in body.split(":")]
    match = _AS_FRACTION.fullmatch(body)
    return [Fraction(term) for term in match.groups() if term] if match else None


def _same_digits(gold: Answer, answer: Answer) -> bool | None:
    """``1011_2``: the same digits and base; a missing base is the other side's. None if neither side has a base."""
    wanted, given = (_DIGITS.fullmatch(plain_text(side.body)) for side in (gold, answer))
    if wanted is None or given is None or (wanted[2] is None and given[2] is None):
        return None
    for match in (wanted, given):
        digits = re.sub(r"\.", "", match[1])
        base = int(match[2] or 0)
        if (digits.isalpha() and (not base or len(digits) == 1)) or (
            base and any(int(digit, 16) >= base for digit in digits)
        ):
            return None  # a_1, a_16
    return wanted[1].lower() == given[1].lower() and (None in (wanted[2], given[2]) or wanted[2] == given[2])


def _same_letters(gold: Answer, answer: Answer) -> bool | None:
    r"""``xy`` and ``x\cdot y``: the same letters; capital letters (matrices, points) also in the same order."""
    texts = [plain_text(side.body) for side in (gold, answer)]
    joined = [_LETTERS.fullmatch(text) is not None for text in texts]
    if joined[0] == joined[1] or not _PRODUCT.fullmatch(texts[joined[0]]):
        return None
    letters = [re.sub(r"\\cdot|\\times|[* ]", "", text) for text in texts]
    if letters[joined[1]].casefold() in _NO_PRODUCTS:
        return False
    if all(each.lstrip("-").islower() for each in letters):
        return sorted(letters[0]) == sorted(letters[1])
    return letters[0] == letters[1] and r"\times" not in texts[joined[0]]


_NO_PRODUCTS = frozenset(
    "no yes on odd even true false none all any one two six ten zero five four nine may am pm".split()
)


def _same_spelling(gold: Answer, answer: Answer) -> bool | None:
    if (
        gold.percent == answer.percent
        and _squeezed(gold.body) == _squeezed(answer.body)
        and gold.name in ("", answer.name)
    ):
        return True
    return True if _squeezed(gold.whole) == _squeezed(answer.whole) else None


def _squeezed(text: str) -> str:
    # Digits or letters separated by a blank stay apart: "1 2" is not 12, and "no on" is not "noon".
    return re.sub(
        r"(?<!\d) (?=\d)|(?<=\d) (?!\d)|(?<![a-zA-Z]) (?=[a-zA-Z])|(?<=[a-zA-Z]) (?![a-zA-Z])|(?<!\w) (?!\w)", "", text
    )


def _same_choice(gold: Answer, answer: Answer) -> bool | None:
    """``(C) 12``, ``C.`` and ``C`` choose C; two choices are none."""
    wanted = _CHOICE.fullmatch(plain_text(gold.body))
    if wanted is None:
        return None
    given = plain_text(answer.body)
    if alone := _CHOICE.fullmatch(given):
        return alone[1] == wanted[1]
    match = _CHOICE_WITH_TEXT.fullmatch(given)
    if match is None:
        return None
    option = match[3].strip()
    several = _OTHER_CHOICE.search(option) or _WITHDRAWN.search(option)
    return not several and (match[1] or match[2]) == wanted[1]


def _same_words(gold: Answer, answer: Answer) -> bool | None:
    wanted, given = plain_text(gold.body), plain_text(answer.body)
    if is_words(wanted):
        same_case = all(map(_may_be_symbols, _tokens(wanted)))
        return is_words(given) and (
            _tokens(wanted) == _tokens(given)
            or (not same_case and _tokens(wanted.casefold()) == _tokens(given.casefold()))
        )
    return False if is_words(given) and gold.value is not None else None


def _tokens(text: str) -> list[str]:
    return re.findall(r"[^\W_]+|[^\w\s,.'’-]", text)


def _may_be_symbols(token: str) -> bool:
    """Whether letters may name points, genes or factors: short ones, ``ABCD``, ``mMkK``."""
    letters = token.casefold()
    if letters in _NO_PRODUCTS | {"red", "day", "mon", "tue", "wed", "thu", "fri", "sat", "sun", "not", "top", "low"}:
        return False
    in_a_row = letters in "abcdefghijklmnopqrstuvwxyz"
    mixed = token not in (letters, token.upper(), letters.capitalize())
    return len(token) <= 3 or in_a_row or not re.search("[aeiouy]", letters) or (mixed and len(token) <= 5)
