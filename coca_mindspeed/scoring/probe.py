"""Try a grader that is not this package's with a right and a wrong answer, before a run trains by it."""

from collections.abc import Sequence
from dataclasses import dataclass

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import SHORT_ANSWER, ResponseFormat
from coca_mindspeed.data.prompts import instruction_suffix
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.custom import CustomGrader
from coca_mindspeed.grading.verdict import MeasuredGrader, Outcome
from coca_mindspeed.utils.console import print_note

_WITHOUT_TEXT = ("code", "simpleqa")  # their right answers are programs, or what a judge accepts
_MOST_WRONG = 3  # other gold answers: one may equal the record's own in another notation
_CONFIDENCE, _DECIMALS = 0.5, 2


@dataclass(frozen=True, slots=True)
class Probe:
    """Answers to one record, as a grader is given them: from whole responses, without their confidences.

    Attributes:
        record: the first one whose answer is text.
        forms: ways to write an answer that the prompt allows; each has the right answer first, then wrong ones.
    """

    record: Record
    forms: tuple[tuple[str, ...], ...]

    @property
    def answers(self) -> list[str]:
        """All answers, form by form."""
        return [answer for form in self.forms for answer in form]


def make_probe(records: Sequence[Record], method: MethodSettings) -> Probe | None:
    """Write right and wrong answers to the first record whose answer is text; None if there is none.

    Wrong are the gold answers of up to three other records, or, if there are none, one with another digit or letter.
    """
    texts = [record for record in records if _is_text(record)]
    if not texts:
        return None
    record, gold = texts[0], _plain(texts[0].answer)
    others = dict.fromkeys(each.answer.strip() for each in texts if _plain(each.answer) != gold)
    wrong = [*others][:_MOST_WRONG] or [_changed(record.answer.strip())]
    written = [
        [_segment(form.format(answer), method) for answer in (record.answer.strip(), *wrong)] for form in _forms(record)
    ]
    return Probe(record, tuple(map(tuple, written)))


def check_custom_grader(grader: MeasuredGrader, name: str, records: Sequence[Record], method: MethodSettings) -> None:
    """Try a custom grader, ``name``; the package's own graders are not tried.

    Says if no record allows it.  Raises GradingError if it does not tell a right answer from a wrong one in any form.
    """
    if not isinstance(grader, CustomGrader):
        return
    if (probe := make_probe(records, method)) is None:
        print_note(f"{name}: not tried with an answer: no record's answer is text")
        return
    answers = probe.answers
    verdicts = grader.verdicts([probe.record] * len(answers), answers)
    outcomes = dict(zip(answers, (verdict.outcome for verdict in verdicts), strict=True))
    if any(
        outcomes[right] is Outcome.RIGHT and _any_is(Outcome.WRONG, outcomes, wrong) for right, *wrong in probe.forms
    ):
        return
    shown = "; ".join(
        f"{right!r} is {outcomes[right].value}, {wrong!r} is {outcomes[wrong].value}"
        for right, wrong, *_ in probe.forms
    )
    raise GradingError(
        f"{name}: does not tell a right answer from a wrong one: {shown} for {probe.record.name}, gold answer "
        f"{probe.record.answer!r:.80}; expected right and wrong. It is given the text behind the confidence"
    )


def _any_is(outcome: Outcome, outcomes: dict[str, Outcome], answers: Sequence[str]) -> bool:
    return any(outcomes[answer] is outcome for answer in answers)


def _is_text(record: Record) -> bool:
    kinds = (record.category, record.dataset, record.metadata.get("grader"))
    return bool(record.answer.strip()) and not any(kind in _WITHOUT_TEXT for kind in kinds)


def _plain(answer: str) -> str:
    return "".join(filter(str.isalnum, answer.casefold())) or answer


def _forms(record: Record) -> tuple[str, ...]:
    """The bare answer, as a warm-up teaches it, and one in a box unless the prompt asks for the answer alone."""
    boxed = "Let me think step by step. The final answer is \\boxed{{{}}}"
    return ("{}",) if instruction_suffix(record).strip() == SHORT_ANSWER else ("{}", boxed)


def _segment(answer: str, method: MethodSettings) -> str:
    """The answer segment of a whole response of the method."""
    position = method.training_method.confidence_position
    written = ResponseFormat(position, method.confidence_decimals or _DECIMALS, spaced=True, thinking=method.thinking)
    return method.parser()(written.response(answer, _CONFIDENCE, _CONFIDENCE)).answer


def _changed(answer: str) -> str:
    """The answer with its first digit or letter replaced by the next one."""
    for place, character in enumerate(answer):
        if character.isdecimal() or (character.isascii() and character.isalpha()):
            last, first = ("9", "0") if character.isdecimal() else ("z", "a")
            following = first if character.casefold() == last else chr(ord(character) + 1)
            return f"{answer[:place]}{following}{answer[place + 1 :]}"
    return f"{answer} 1"
