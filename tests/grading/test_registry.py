"""Graders by name and by record, the checks of records before a run, and graders that fail."""

import json
import pickle
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from coca_mindspeed.data.records import Record, RecordError, read_records, record_from_json, write_records
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.custom import FaultTolerantGrader
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.registry import AutoGrader, build_grader, grader_name, label_checker
from coca_mindspeed.grading.verdict import Outcome, Verdict
from tests.grading.tables import read_table
from tests.shared_data import shared_data


def record(answer="1", category="math", dataset="mine", id="bad", **metadata):
    return Record(id, dataset, category, "?", answer, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("maths", {}, "'math'"),
        ("math", {"second": 1}, "'seconds'"),
        ("math", {"workers": 0}, "found 0"),
        ("math", {"seconds": 0.0}, "found 0"),
        ("exact", {"strict": True}, "strict"),
        ("auto", {"match": "contains"}, '"factual"'),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, named):
    with pytest.raises(GradingError, match=named):
        build_grader(name, options)


@pytest.mark.parametrize(
    ("category", "dataset", "metadata", "expected"),
    [
        ("math", "gsm8k", {}, "math"),
        ("code", "mbpp_sanitized", {}, "code"),
        ("factual", "triviaqa", {}, "factual"),
        ("factual", "simpleqa", {}, "simpleqa"),
        ("math", "arithmetic", {}, "exact"),
        ("math", "gsm8k", {"grader": "exact"}, "exact"),
    ],
)
def test_the_choice_by_record(category, dataset, metadata, expected):
    assert grader_name(record("1", category, dataset, **metadata)) == expected


@pytest.mark.parametrize(
    "bad",
    [record(category="poetry"), record(grader="maths"), record(grader=3), record("x", "factual", "simpleqa")],
)
def test_a_record_without_a_grader_stops_the_batch_first(bad):
    grader = build_grader("auto")
    with pytest.raises(GradingError):
        grader.grade([record(dataset="arithmetic"), bad], ["1", "1"])
    assert not any(grader.metrics().values())
    grader.close()


def test_mixed_records_are_graded_in_order():
    records = [
        record("7", "math", "gsm8k"),
        record("7", "math", "arithmetic"),
        record("", "factual", "triviaqa", aliases=["Seven"]),
        record("8", "math", "gsm8k"),
        record("8", "math", "arithmetic"),
    ]
    grader = build_grader("auto", {"math": {"workers": 1, "seconds": 9.0}, "factual": {"match": "contains"}})
    verdicts = grader.grade(records, [r"\boxed{7.0}", "7.0", "It is seven", "8", "8"])
    metrics = grader.metrics()
    grader.close()
    assert [v.outcome for v in verdicts] == [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT, Outcome.RIGHT, Outcome.RIGHT]
    assert (metrics["right"], metrics["math/right"], metrics["exact/wrong"]) == (4.0, 2.0, 1.0)


def test_the_table_of_records_without_a_category():
    rows = read_table("records_without_category.tsv")
    records = [
        record_from_json({"question": "What is it?", "answer": answer}, "here", "mine", number)
        for number, (answer, *_) in enumerate(rows)
    ]
    with closing(build_grader("auto", {"math": {"workers": 1, "seconds": 60.0}})) as grader:
        verdicts = grader.grade(records, [row[1] for row in rows])
    was = [
        (*row[:2], verdict.outcome.value, record.category)
        for row, verdict, record in zip(rows, verdicts, records, strict=True)
    ]
    assert was == rows


def test_importing_the_registry_is_cheap():
    code = (
        "import sys, coca_mindspeed.grading.registry as r; r.build_grader('exact'); "
        "print([m for m in ('torch', 'sympy', 'openai', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TESTS = {"kind": "asserts", "code": "assert f(1) == 1"}


@pytest.fixture(scope="module")
def grader():
    grader = AutoGrader(
        math={"workers": 1, "seconds": 1.0},
        code={"allow_unsandboxed": True},  # a check runs no program
        simpleqa={"url": "http://127.0.0.1:1", "model": "m", "key_variable": None},
    )
    yield grader
    grader.close()


@pytest.mark.parametrize(
    "bad",
    [
        *map(record, ("", r"\frac{1", r"\frac{5}{0}", "0=0", "(10^{10})!", "2+2=<<2+2=4>>4\n#### 4")),
        *map(record, ("It is 42", "The area is 42 cm^2", "The largest n is 34")),
        *(record(" ", dataset=dataset) for dataset in ("arithmetic", "simpleqa")),
        record("", "factual"),
        record("", "factual", aliases=["the", "!"]),
        record("Madrid, because " + "the king moved there " * 12, "factual"),
        record("", "code"),
        *(record("", "code", tests={**TESTS, "code": code}) for code in ("assert f(1) ==", "assert 1 == 1")),
        record("", "code", tests={"kind": "stdio", "cases": []}),
    ],
)
def test_what_no_answer_can_be_graded_by_is_refused_with_file_and_line(tmp_path, grader, bad):
    good = [
        record(r"\frac{\pi}{2}", id="a"),
        record("", "code", id="b", tests=TESTS),
        record("Paris", "factual", id="c", aliases=["Paris"]),
    ]
    path = tmp_path / "train.jsonl"
    write_records(path, [*good, bad])
    with pytest.raises(DataError, match=r"train\.jsonl:4: .*'bad'"):
        grader.check([*good, *read_records(path)])


@pytest.mark.parametrize(
    ("checked", "named"),
    [
        (record("", "code", tests={"kind": "stdio", "cases": [{"input": "", "output": ""}]}), None),
        (record("", "code", tests={"kind": "stdio", "cases": []}), "tests['cases']"),
        (record("", "code"), "metadata['tests']"),
        (record("", "code", tests={"kind": "pytest"}), "'pytest'"),
        (record("", "factual", aliases=["x"]), "empty"),
        (record("Mars", "factual"), None),
        (record("x", "poetry"), "'poetry'"),
        (record("x", grader="maths"), "'math'"),
        (record(" ", grader="exact"), "gold answer is empty"),
        (record("\\text{", grader="exact"), None),  # it need not be mathematics
        (record("\\text{"), "mathematics"),
    ],
)
def test_preparation_drops_what_no_answer_can_be_graded_by(checked, named):
    check = label_checker(lambda golds: ["no mathematics"] * len(golds))
    [problem] = check([checked])
    assert (problem == "") if named is None else (named in problem)


@pytest.mark.published
def test_raw_answers_of_gsm8k_are_refused():
    rows = [json.loads(line) for line in shared_data("gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()]
    grader = MathGrader(workers=1)
    assert all(grader.gold_problems([row["answer"] for row in rows]))
    assert not any(grader.gold_problems([row["answer"].rpartition("#### ")[2] for row in rows]))
    grader.close()


def test_a_record_error_crosses_processes():
    error = pickle.loads(pickle.dumps(RecordError(record(), "no tests")))  # noqa: S301
    assert isinstance(error, RecordError)
    assert (error.record, str(error)) == (record(), "record 'bad' of 'mine': no tests")


RIGHT, WRONG, UNGRADABLE = Outcome.RIGHT, Outcome.WRONG, Outcome.UNGRADABLE


class _Grader:
    """Finds every answer right, and raises ``failure`` for a batch with one for which ``fails`` holds."""

    def __init__(self, failure, fails="b".__eq__):
        self.failure, self.fails, self.calls, self.closed = failure, fails, 0, False

    def grade(self, records, answers):
        self.calls += 1
        if any(map(self.fails, answers)):
            raise self.failure
        return [Verdict(RIGHT) for _ in answers]

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (RecursionError("deep"), WRONG),
        (ValueError("Exceeds the limit (4300 digits)"), WRONG),
        (GradingError("the judge does not grade"), UNGRADABLE),
        (DataError("no aliases"), UNGRADABLE),
        (OSError("no process"), UNGRADABLE),
        (MemoryError(), UNGRADABLE),
    ],
)
def test_whose_fault_a_failure_is(failure, outcome):
    for fails, expected in (("b".__eq__, outcome), (lambda answer: True, UNGRADABLE)):  # the gold answer fails too
        assert FaultTolerantGrader(_Grader(failure, fails)).grade([record()], ["b"])[0].outcome is expected


def test_a_failure_is_its_own_answers_alone_and_says_why(caplog):
    grader = _Grader(OSError("out of memory"))
    steady = FaultTolerantGrader(grader)
    verdicts = steady.grade([record()] * 3, ["a", "b", "c"])
    assert [v.outcome for v in verdicts] == [RIGHT, UNGRADABLE, RIGHT]
    assert verdicts[1].reason == "the grader failed: OSError: out of memory"
    grader.calls = 0
    many = ["b" if n == 300 else "a" for n in range(512)]
    assert [v.outcome for v in steady.grade([record()] * 512, many)] == [
        UNGRADABLE if a == "b" else RIGHT for a in many
    ]
    assert grader.calls == 1 + 2 * 9  # halves, and not each for itself
    grader.calls = 0
    assert len(steady.grade([record()], ["a"])) == 1
    assert grader.calls == 1, "what does not fail is graded once"
    assert steady.grade([], []) == []
    steady.close()
    assert grader.closed


def test_failures_are_one_line_of_the_log_with_their_number(caplog):
    """Exceptions of the halves of a batch were chained to those of the whole: thousands of lines."""
    caplog.set_level("DEBUG", logger="coca_mindspeed")

    def grade(records, answers):
        raise ValueError(f"{len(records)} answers\nare no numbers")

    assert len(FaultTolerantGrader(SimpleNamespace(grade=grade)).grade([record()] * 72, ["b"] * 72)) == 72
    [line] = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert "72 of 72" in line
    assert f"ValueError: 1 answers are no numbers ({__file__}:" in line
    failures = [entry.exc_info[1] for entry in caplog.records if entry.exc_info]  # with the level DEBUG
    assert len(failures) == 72
    assert not any(failure.__context__ for failure in failures)
