"""Grade by math-verify, for figures that can be compared with other people's: evaluate --grader ./FILE.py:MathVerify.

Do not train with it: of the 997 wrong pairs of answers in tests/grading/math_pairs.tsv it accepts about 230, such as 12
m for 12 cm, and of the 877 right ones about 450 (version 0.9.0; two runs).

Install it with pip install 'math-verify[antlr4_9_3]', whose version of antlr4 is Hydra's.
"""

from collections.abc import Sequence

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from coca_mindspeed.data.records import Record

_FORMS = (LatexExtractionConfig(), ExprExtractionConfig())
_SECONDS = 5  # of each parse and each comparison; math-verify stops them by SIGALRM


class MathVerify:
    """Compares each answer with the record's gold answer; an answer that cannot be parsed is wrong."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[bool]:
        """Return a verdict for each answer."""
        return [self._is_right(record.answer, answer) for record, answer in zip(records, answers, strict=True)]

    def _is_right(self, gold: str, answer: str) -> bool:
        expected = parse(f"${gold}$", _FORMS, parsing_timeout=_SECONDS)
        return bool(verify(expected, parse(answer, _FORMS, parsing_timeout=_SECONDS), timeout_seconds=_SECONDS))
