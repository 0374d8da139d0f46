"""Questions of a run, and flaws that it may start with: gold answers, forms of answers, a grader that does not fit."""

import re
from collections import defaultdict
from collections.abc import Sequence

from coca_mindspeed.config.plan import QuestionCounts, Questions
from coca_mindspeed.data.records import Record, default_category
from coca_mindspeed.errors import show_value

_FEW, _SHARE = 10, 0.1  # questions, and a share of them, from which on a warning is due
# A form of its own for the answer, or for the thought before it, which the system prompt contradicts.
_FORM = re.compile(r"\\boxed\b|</?(?:answer|think|reasoning)>|step by step", re.IGNORECASE)
#: Category of the answers -> graders of another kind.
_MISFITS = {"factual": ("math",), "math": ("exact", "factual")}
_KINDS = {"factual": "words", "math": "numbers or formulas"}


def questions_of(train: Sequence[Record], evaluate: Sequence[Record], asked: int, grader: str) -> Questions:
    """Count the questions of a run, whose training asks ``asked`` in all steps together, and look for flaws."""
    counts = QuestionCounts.of((record.question for record in train), (record.question for record in evaluate), asked)
    return Questions(counts, record_flaws(train, grader))


def record_flaws(records: Sequence[Record], grader: str) -> tuple[tuple[str, str, str], ...]:
    """``(code, reason, what to do)`` for each flaw of many training records."""
    golds: dict[str, set[str]] = defaultdict(set)
    for record in records:
        golds[record.question].add(record.answer.strip())
    flaws = []
    if several := sum(len(answers) > 1 for answers in golds.values()):
        reason = f"{several:,} of its {len(golds):,} different questions have several gold answers in several records"
        flaws.append(("gold-contradicts", reason, "keep one answer of each question: the others count as wrong"))
    answers = set().union(*golds.values())
    if len(golds) >= _FEW and len(answers) == 1:
        reason = f"all {len(golds):,} different questions have the gold answer {show_value(next(iter(answers)))}"
        flaws.append(("gold-same", reason, "correct them: a model learns to answer nothing else"))
    forms = sum(bool(_FORM.search(question)) for question in golds)
    if forms and forms >= _SHARE * len(golds):
        reason = f"{forms:,} of its {len(golds):,} different questions ask for a form of answer of their own"
        flaws.append(("question-form", reason, "remove it: the system prompt asks for another form"))
    judged = [record for record in records if record.category in _MISFITS and record.metadata.get("grader") != grader]
    kinds = [default_category(record.answer) for record in judged]
    for kind, graders in _MISFITS.items():
        if grader in graders and (misfits := kinds.count(kind)) >= max(1, _SHARE * len(records)):
            reason = (
                f"{misfits:,} of {len(records):,} gold answers are {_KINDS[kind]}, and grader {grader} is for others"
            )
            flaws.append(("grader-misfit", reason, "grader auto grades each answer by its kind (docs/grading.md)"))
    return tuple(flaws)
