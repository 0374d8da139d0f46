"""Gold answers are checked at the start of a run: each once, by its own grader, with file and line of what is wrong."""

import json
import pickle

import pytest

from coca_mindspeed.data.records import Record, RecordError, read_records, write_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.registry import AutoGrader, check_records, label_checker
from tests.shared_data import shared_data

TESTS = {"kind": "asserts", "code": "assert f(1) == 1"}


def record(answer="1", category="math", **fields):
    values = {"id": "bad", "dataset": "d", "category": category, "question": "?", "answer": answer}
    return Record(**{**values, **fields})


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
        record("", "factual", metadata={"aliases": ["the", "!"]}),
        record("Madrid, because " + "the king moved there " * 12, "factual"),
        record("", "code"),
        *(
            record("", "code", metadata={"tests": {**TESTS, "code": code}})
            for code in ("assert f(1) ==", "assert 1 == 1")
        ),
        record("", "code", metadata={"tests": {"kind": "stdio", "cases": []}}),
    ],
)
def test_what_no_answer_can_be_graded_by_is_refused_with_file_and_line(tmp_path, grader, bad):
    good = [
        record(r"\frac{\pi}{2}", id="a"),
        record("", "code", id="b", metadata={"tests": TESTS}),
        record("Paris", "factual", id="c", metadata={"aliases": ["Paris"]}),
    ]
    path = tmp_path / "train.jsonl"
    write_records(path, [*good, bad])
    with pytest.raises(DataError, match=r"train\.jsonl:4: .*'bad'"):
        check_records(grader, {"data.evaluate": good, path: list(read_records(path))})


@pytest.mark.parametrize(
    ("checked", "named"),
    [
        (record("", "code", metadata={"tests": {"kind": "stdio", "cases": [{"input": "", "output": ""}]}}), None),
        (record("", "code", metadata={"tests": {"kind": "stdio", "cases": []}}), "tests['cases']"),
        (record("", "code"), "metadata['tests']"),
        (record("", "code", metadata={"tests": {"kind": "pytest"}}), "'pytest'"),
        (record("", "factual", metadata={"aliases": ["x"]}), "empty"),
        (record("Mars", "factual"), None),
        (record("x", "poetry"), "'poetry'"),
        (record("x", metadata={"grader": "maths"}), "'math'"),
        (record(" ", metadata={"grader": "exact"}), "gold answer is empty"),
        (record("\\text{", metadata={"grader": "exact"}), None),  # it need not be mathematics
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
    assert (error.record, str(error)) == (record(), "record 'bad' of 'd': no tests")
