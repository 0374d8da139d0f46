"""Preparing data sets from end to end: every row is accounted for, the same input gives the same bytes."""

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.filters import EvaluationIndex, by_difficulty, by_source
from coca_mindspeed.data.prepare import STAGES, Preparation, prepare
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.data.registry import SOURCES
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.labels import label_checker
from tests.data import source_rows


def big_math_row(problem, answer="1", source="orca_math", rate=0.5):
    return {"problem": problem, "answer": answer, "source": source, "domain": ["x"], "llama8b_solve_rate": rate}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def findings(output):
    return [json.loads(line) for line in (output / "findings.jsonl").read_text().splitlines()]


LONG = "A farmer has a field of wheat and sells every bushel of it at the market for a price of {} coins a bushel"
EVERY_FATE = [
    big_math_row(LONG.format(30)),
    big_math_row("What is the capital of nowhere?", source="web"),
    big_math_row("Too easy?", rate=1.0),
    big_math_row("It is said that a quick brown fox jumps over one lazy dog each and every day of the year"),
    big_math_row("What is wrong with this gold answer?", answer="\\text{"),
    big_math_row(LONG.format(30).upper()),
    big_math_row(LONG.format(30), answer="2"),
    big_math_row(LONG.format(31)),
    {"problem": "no answer", "source": "x", "llama8b_solve_rate": 0.5},
]
EVALUATION = [Record("e7", "gsm8k", "math", "A quick brown fox jumps over one lazy dog each and every day", "1")]


# What the grader itself says is in test_filters.py; here it matters only what becomes of a record.
CHECK_LABELS = label_checker(lambda golds: ["it cannot be parsed" if gold == "\\text{" else "" for gold in golds])


def preparation_of(source, inputs, **options):
    return Preparation(SOURCES[source], inputs, CHECK_LABELS, **options)


def every_fate(tmp_path, **changes):
    values = {
        "source": SOURCES["big_math"],
        "inputs": [write_jsonl(tmp_path / "big.jsonl", EVERY_FATE)],
        "check_labels": CHECK_LABELS,
        "skip_bad": 1,
        "filters": {"source": by_source(set(), {"web"}), "difficulty": by_difficulty(0.1, 0.9)},
        "evaluation": EvaluationIndex(EVALUATION, 12),
        "shuffle": False,
    }
    return Preparation(**{**values, **changes})


def test_every_dropped_row_is_listed_with_its_reason(tmp_path):
    report = prepare(every_fate(tmp_path), tmp_path / "out")
    file = str(tmp_path / "big.jsonl")
    assert [(f["file"], f["row"], f["stage"], f["reason"]) for f in findings(tmp_path / "out")] == [
        (file, 2, "source", "web"),
        (file, 3, "difficulty", "below 0.1"),
        (file, 4, "contamination", "gsm8k"),
        (file, 9, "malformed", "malformed"),
        (file, 5, "gold", "it cannot be parsed"),
        (file, 6, "duplicate", "same gold answer"),
        (file, 7, "duplicate", "another gold answer"),
    ]
    details = {f["row"]: f["detail"] for f in findings(tmp_path / "out")}
    assert details[4] == "e7: a quick brown fox jumps over one lazy dog each and every"
    assert details[9] == "column 'answer' is missing; the row has 'problem', 'source', 'llama8b_solve_rate'"
    assert details[6] == details[7] == f"of {file}:1"
    assert [record.id for record in read_records(tmp_path / "out" / "train.jsonl")] == ["big_math-0", "big_math-7"]
    assert (report.rows_in, report.rows_out) == (9, 2)
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (written["rows_in"], written["rows_out"], written["outputs"]["train.jsonl"]["rows"]) == (9, 2, 2)
    assert list(written["dropped"]) == [stage for stage in STAGES if stage in written["dropped"]]
    assert written["dropped"]["duplicate"] == {"another gold answer": 1, "same gold answer": 1}
    assert sum(sum(reasons.values()) for reasons in written["dropped"].values()) == 7
    assert (written["inputs"][0]["rows"], len(written["inputs"][0]["sha256"])) == (9, 64)


def test_one_bad_row_more_than_allowed_stops_the_run(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text('{"problem": \n' + json.dumps(big_math_row("q?")) + "\n[]\n")
    preparation = preparation_of("big_math", [path], skip_bad=1)
    with pytest.raises(DataError, match=r"big\.jsonl:3: .*--skip-bad allows 1"):
        prepare(preparation, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = prepare(preparation_of("big_math", [path], skip_bad=2), tmp_path / "out")
    assert (report.rows_in, report.rows_out) == (3, 1)


def test_a_data_set_of_which_nothing_is_left_says_why(tmp_path):
    preparation = every_fate(tmp_path, filters={"source": by_source({"nothing"}, set())})
    with pytest.raises(DataError, match="source: 8, malformed: 1"):
        prepare(preparation, tmp_path / "out")
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="of 0"):
        prepare(preparation_of("big_math", [empty]), tmp_path / "out")


def test_a_benchmark_is_kept_whole_and_doubtful_gold_is_reported(tmp_path):
    rows = [{**source_rows.MATH500[0], "unique_id": str(i), "answer": a} for i, a in enumerate(["1", "\\text{", "3"])]
    whole = {"gold": "report", "drop_duplicates": False, "shuffle": False}
    preparation = preparation_of("math500", [write_jsonl(tmp_path / "m.jsonl", rows)], **whole)
    report = prepare(preparation, tmp_path / "out")
    assert [record.id for record in read_records(tmp_path / "out" / "test.jsonl")] == ["0", "1", "2"]
    assert report.dropped == {}
    assert {stage: sum(reasons.values()) for stage, reasons in report.reported.items()} == {"gold": 1}
    assert [(f["row"], f["dropped"]) for f in findings(tmp_path / "out")] == [(2, False)]


def test_what_json_cannot_hold_is_dropped_with_its_row(tmp_path):
    calls = '{"fn_name": "f", "inputs": [[1]], "outputs": [[NaN]]}'
    rows = [
        source_rows.taco_row(question="half \ud800 pair"),
        source_rows.taco_row(),
        source_rows.taco_row(input_output=calls),
    ]
    report = prepare(preparation_of("taco", [write_jsonl(tmp_path / "t.jsonl", rows)]), tmp_path / "out")
    assert report.dropped["ungradable"] == {"holds a value that JSON cannot represent": 2}
    assert [f["row"] for f in findings(tmp_path / "out")] == [1, 3]


def prepared(tmp_path, name, **changes):
    path = write_jsonl(tmp_path / "big.jsonl", [big_math_row(f"question {i % 190}") for i in range(200)])
    values = {"gold": "off", "validation": 0.1, "seed": 1}
    prepare(preparation_of("big_math", [path], **{**values, **changes}), tmp_path / name)
    return {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_an_other_order(tmp_path):
    first, again = prepared(tmp_path, "a"), prepared(tmp_path, "b")
    other = prepared(tmp_path, "c", seed=2)
    assert first == again
    names = ("coca-mindspeed.json", "findings.jsonl", "report.json", "train.jsonl", "validation.jsonl")
    assert tuple(sorted(first)) == names
    assert first["train.jsonl"] != other["train.jsonl"]
    lines = [sorted((files["train.jsonl"] + files["validation.jsonl"]).splitlines()) for files in (first, other)]
    assert lines[0] == lines[1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    questions=st.lists(st.sampled_from(["a", "A ", "b", "c 1", "c 2", ""]), min_size=1, max_size=12),
    validation=st.sampled_from([0.0, 0.3]),
    shuffle=st.booleans(),
)
def test_every_row_comes_out_or_is_listed(tmp_path_factory, questions, validation, shuffle):
    directory = tmp_path_factory.mktemp("rows")
    path = write_jsonl(directory / "big.jsonl", [big_math_row(question) for question in questions])
    preparation = preparation_of("big_math", [path], skip_bad=99, validation=validation, shuffle=shuffle)
    if not any(questions):
        with pytest.raises(DataError, match="big_math"):
            prepare(preparation, directory / "out")
        return
    report = prepare(preparation, directory / "out")
    listed = Counter(f["row"] for f in findings(directory / "out"))
    written = [
        int(record.id.removeprefix("big_math-")) + 1
        for name in report.outputs
        for record in read_records(directory / "out" / name)
    ]
    assert sorted([*listed.elements(), *written]) == list(range(1, len(questions) + 1))
