"""Whether two answers to one record mean the same: by the grader of its kind of data set, without the gold answer."""

from collections.abc import Sequence
from types import TracebackType

from coca_mindspeed.baselines.same_programs import SamePrograms
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import Equivalence, Grader

# A judge is asked about gold answers; two free answers to such a question are compared as facts are.
_STANDS_IN = {"simpleqa": "factual"}


class Equivalences:
    """Math: symbolic; factual: normalised text; code: the same outputs on the tests' inputs; exact: the same text."""

    def __init__(self) -> None:
        self._graders: dict[str, Equivalence] = {}
        self._opened: list[Grader] = []
        self._programs: SamePrograms | None = None

    def __enter__(self) -> "Equivalences":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for grader in self._opened:
            grader.close()

    def final_answers(self, record: Record, answers: Sequence[str]) -> Sequence[str | None]:
        """The final answers of a record's responses, None where a response gives none."""
        name = grader_name(record)
        if name == "code":
            return self._code().final_answers(record, answers)
        return self._of(name).final_answers(answers)

    def same(self, record: Record, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Whether the final answers of each pair mean the same."""
        name = grader_name(record)
        return self._code().same(record, pairs) if name == "code" else self._of(name).equivalent(pairs)

    def _of(self, name: str) -> Equivalence:
        if name not in self._graders:
            grader = build_grader(_STANDS_IN.get(name, name))
            assert isinstance(grader, Equivalence), f"the grader {name} compares no two answers"
            self._opened.append(grader)
            self._graders[name] = grader
        return self._graders[name]

    def _code(self) -> SamePrograms:
        if self._programs is None:
            grader = build_grader("code")
            assert isinstance(grader, CodeGrader)
            self._opened.append(grader)
            self._programs = SamePrograms(grader)
        return self._programs
