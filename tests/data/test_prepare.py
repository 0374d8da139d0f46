"""Preparing data sets: every row is accounted for, the same input gives the same bytes; and each filter."""

import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.cli import main
from coca_mindspeed.data.prepare import (
    CHECKS,
    SHORTEST_PASSAGE,
    EvaluationIndex,
    Overlap,
    Preparation,
    by_difficulty,
    by_length,
    by_source,
    prepare,
)
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.data.registry import SOURCES
from coca_mindspeed.errors import DataError
from tests.data import source_rows
from tests.tokenizers_for_tests import llama3_like, qwen_like


def big_math_row(problem, answer="1", source="orca_math", rate=0.5):
    return {"problem": problem, "answer": answer, "source": source, "domain": ["x"], "llama8b_solve_rate": rate}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def findings(output):
    return [json.loads(line) for line in (output / "findings.jsonl").read_text().splitlines()]


def record(question="q", **metadata):
    return Record("i", "d", "math", question, "1", None, metadata)


def preparation_of(source, inputs, **options):
    def check_labels(records):
        return ["it cannot be parsed" if record.answer == "\\text{" else "" for record in records]

    return Preparation(SOURCES[source], inputs, check_labels, **options)


LONG = "A farmer has a field of wheat and sells every bushel of it at the market for a price of {} coins a bushel"
FOX = "a quick brown fox jumps over one lazy dog each and every day"
# A row for each fate; line 1 and 8 are kept.
EVERY_FATE = [
    big_math_row(LONG.format(30)),
    big_math_row("Why? " * 200),
    big_math_row("Too easy?", rate=1.0),
    big_math_row(f"It is said that {FOX} of the year"),
    big_math_row("What is wrong with this gold answer?", answer="\\text{"),
    big_math_row(LONG.format(30).upper()),
    big_math_row(LONG.format(30), answer="2"),
    big_math_row(LONG.format(31)),
    {"problem": "no answer", "source": "x", "llama8b_solve_rate": 0.5},
    big_math_row("Once upon a time and a very good time it was there was a moocow coming down"),
    big_math_row("What is the capital of nowhere?", source="web"),
]


def test_every_dropped_row_is_listed_with_its_reason(tmp_path, capsys):
    qwen_like().save_pretrained(tmp_path / "tokenizer")
    file = str(write_jsonl(tmp_path / "big.jsonl", EVERY_FATE))
    for name, text in (("gsm8k", f"If {FOX}, why?"), ("own", "once upon a time and a very good time it was there")):
        write_records(tmp_path / f"{name}.jsonl", [Record("o", name, "math", text, "1")])
    command = ["data", "prepare", "big_math", "--input", file, "--output", tmp_path / "out", "--skip-bad", 1]
    command += ["--difficulty", 0.1, 0.9, "--tokenizer", tmp_path / "tokenizer", "--max-tokens", 500, "--seed", 3]
    command += ["--exclude-source", "web"]
    command += ["--decontaminate", tmp_path / "gsm8k.jsonl", "--decontaminate", tmp_path / "own.jsonl"]
    assert main([str(word) for word in command]) == 0
    found = {f["row"]: f for f in findings(tmp_path / "out")}
    assert {f["file"] for f in found.values()} == {file}
    assert {row: (f["check"], f["reason"]) for row, f in found.items() if row != 5} == {
        2: ("length", "prompt longer than 500 tokens"),
        3: ("difficulty", "below 0.1"),
        4: ("contamination", "gsm8k"),
        6: ("duplicate", "same gold answer"),
        7: ("duplicate", "another gold answer"),
        9: ("malformed", "malformed"),
        10: ("contamination", "own"),
        11: ("source", "web"),
    }
    assert found[5]["check"] == "gold"
    assert found[4]["detail"] == f"o: {FOX}"
    assert found[9]["detail"] == "column 'answer' is missing; the row has 'problem', 'source', 'llama8b_solve_rate'"
    assert found[6]["detail"] == found[7]["detail"] == f"of {file}:1"
    assert {record.id for record in read_records(tmp_path / "out" / "train.jsonl")} == {"big_math-0", "big_math-7"}
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (written["rows_in"], written["rows_out"], written["outputs"]["train.jsonl"]["rows"]) == (11, 2, 2)
    assert list(written["dropped"]) == [check for check in CHECKS if check in written["dropped"]]
    assert written["dropped"]["duplicate"] == {"another gold answer": 1, "same gold answer": 1}
    assert sum(sum(reasons.values()) for reasons in written["dropped"].values()) == 9
    assert (written["inputs"][0]["rows"], len(written["inputs"][0]["sha256"])) == (11, 64)
    assert (written["options"]["difficulty"], written["options"]["seed"]) == ([0.1, 0.9], 3)
    printed = capsys.readouterr().out
    assert "big_math: 11 rows in, 2 rows out" in printed
    assert "dropped, contamination (shares a passage with an evaluation question): 2" in printed


def test_one_bad_row_more_than_allowed_stops_the_run(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text('{"problem": \n' + json.dumps(big_math_row("q?")) + "\n[]\n")
    with pytest.raises(DataError, match=r"big\.jsonl:3: .*--skip-bad allows 1"):
        prepare(preparation_of("big_math", [path], skip_bad=1), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = prepare(preparation_of("big_math", [path], skip_bad=2), tmp_path / "out")
    assert (report["rows_in"], report["rows_out"]) == (3, 1)


def test_a_data_set_of_which_nothing_is_left_says_why(tmp_path):
    path = write_jsonl(tmp_path / "big.jsonl", EVERY_FATE)
    filters = {"difficulty": by_difficulty(0.9, 0.95)}
    with pytest.raises(DataError, match="difficulty: 10, malformed: 1"):
        prepare(preparation_of("big_math", [path], skip_bad=1, filters=filters), tmp_path / "out")
    with pytest.raises(DataError, match="of 0"):
        prepare(preparation_of("big_math", [write_jsonl(tmp_path / "empty.jsonl", [])]), tmp_path / "out")


def test_a_benchmark_is_kept_whole_and_doubtful_gold_is_reported(tmp_path):
    rows = [{**source_rows.MATH500[0], "unique_id": str(i), "answer": a} for i, a in enumerate(["1", "\\text{", "3"])]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    report = prepare(preparation_of("math500", [path], gold="report"), tmp_path / "out")
    assert [record.id for record in read_records(tmp_path / "out" / "test.jsonl")] == ["0", "1", "2"]
    assert report["dropped"] == {}
    assert report["reported"] == {"gold": {"it cannot be parsed": 1}}
    assert [(f["row"], f["dropped"]) for f in findings(tmp_path / "out")] == [(2, False)]


def test_what_json_cannot_hold_is_dropped_with_its_row(tmp_path):
    calls = '{"fn_name": "f", "inputs": [[1]], "outputs": [[NaN]]}'
    changes = ({"question": "half \ud800 pair"}, {}, {"input_output": calls})
    path = write_jsonl(tmp_path / "t.jsonl", [source_rows.taco_row(**changed) for changed in changes])
    report = prepare(preparation_of("taco", [path]), tmp_path / "out")
    assert report["dropped"]["ungradable"] == {"holds a value that JSON cannot represent": 2}
    assert [f["row"] for f in findings(tmp_path / "out")] == [1, 3]


def test_the_same_seed_gives_the_same_bytes_and_another_an_other_order(tmp_path):
    path = write_jsonl(tmp_path / "big.jsonl", [big_math_row(f"question {i % 190}") for i in range(200)])

    def prepared(name, seed):
        prepare(preparation_of("big_math", [path], gold="off", validation=0.1, seed=seed), tmp_path / name)
        return {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()}

    first, again, other = prepared("a", 1), prepared("b", 1), prepared("c", 2)
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
    source=st.sampled_from(["big_math", "math500"]),
)
def test_every_row_comes_out_or_is_listed(tmp_path_factory, questions, validation, source):
    directory = tmp_path_factory.mktemp("rows")
    path = write_jsonl(directory / "big.jsonl", [big_math_row(question) for question in questions])
    preparation = preparation_of(source, [path], skip_bad=99, validation=validation)
    if not any(questions):
        with pytest.raises(DataError, match=source):
            prepare(preparation, directory / "out")
        return
    report = prepare(preparation, directory / "out")
    listed = Counter(f["row"] for f in findings(directory / "out"))
    written = [
        [int(record.id.rpartition("-")[2]) + 1 for record in read_records(directory / "out" / name)]
        for name in report["outputs"]
    ]
    assert sorted([*listed.elements(), *chain(*written)]) == list(range(1, len(questions) + 1))
    assert source == "big_math" or written == list(map(sorted, written))


@pytest.mark.parametrize(
    ("question", "repeated"),
    [
        ("What is 2²?", True), ("what\u200b is  ２²?", True), ("What is 22?", False), ("What is 2₂?", False),
        ("What is 2½?", False),
    ],
)  # fmt: skip
def test_a_repeated_question_looks_the_same(tmp_path, question, repeated):
    path = write_jsonl(tmp_path / "big.jsonl", [big_math_row("What is 2²?", "4"), big_math_row(question, "４")])
    report = prepare(preparation_of("big_math", [path]), tmp_path / "out")
    assert report["dropped"] == ({"duplicate": {"same gold answer": 1}} if repeated else {})


@pytest.mark.parametrize(
    ("include", "exclude", "source", "reason"),
    [("a", "", "a", None), ("a", "", "b", "b"), ("a", "", None, "unknown"), ("", "a", "a", "a"), ("", "a", None, None),
     ("a", "a", "a", "a")],
)  # fmt: skip
def test_source(include, exclude, source, reason):
    found = record() if source is None else record(source=source)
    assert by_source(set(include), set(exclude))(found) == reason


@pytest.mark.parametrize(
    ("difficulty", "reason"),
    [(0.0, "below 0.25"), (0.25, None), (0.5, None), (0.75, None), (0.7500001, "above 0.75"), (1, "above 0.75")],
)
def test_difficulty_is_closed_at_both_ends(difficulty, reason):
    assert by_difficulty(0.25, 0.75)(record(difficulty=difficulty)) == reason
    assert by_difficulty(0, 1)(record()) == "unknown"


@pytest.mark.parametrize("kind", [qwen_like, llama3_like])
def test_length_counts_the_whole_prompt(tmp_path, kind):
    kind().save_pretrained(tmp_path)
    one = record("What is 1 + 2?")
    messages = prompt_messages(one, SYSTEM_PROMPTS["first"])
    rendered = kind().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    length = len(kind().encode(rendered, add_special_tokens=False))
    assert by_length(tmp_path, SYSTEM_PROMPTS["first"], length)(one) is None
    too_long = f"prompt longer than {length - 1} tokens"
    assert by_length(tmp_path, SYSTEM_PROMPTS["first"], length - 1)(one) == too_long


def evaluation_records(texts, dataset="eval"):
    return [Record(f"{dataset}-{i}", dataset, "math", text, "1") for i, text in enumerate(texts)]


def contaminated(question, evaluation, n):
    """The rule, word for word."""

    def runs(words, length):
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    words = question.split()
    for other in (text.split() for text in evaluation):
        if words and words == other:
            return True
        length = min(n, len(other))
        if len(other) >= SHORTEST_PASSAGE and runs(words, length) & runs(other, length):
            return True
    return False


@pytest.mark.parametrize(("share", "validated"), [(0.5, 2), (0.1, 0), (0.2, 1)])
def test_the_validation_split_is_the_nearest_number_of_records(tmp_path, share, validated):
    rows = [big_math_row(LONG.format(price)) for price in (30, 31, 32)]
    path = write_jsonl(tmp_path / "big.jsonl", rows)
    report = prepare(preparation_of("big_math", [path], gold="off", validation=share), tmp_path / "out")
    assert report["outputs"]["validation.jsonl"]["rows"] == validated
    assert report["outputs"]["train.jsonl"]["rows"] == 3 - validated


SENTENCES = st.lists(st.sampled_from(["a", "b"]), max_size=14).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.lists(SENTENCES.filter(bool), max_size=4), SENTENCES.filter(bool), st.integers(SHORTEST_PASSAGE, 9))
def test_passages_equal_brute_force(evaluation, question, n):
    overlap = EvaluationIndex(evaluation_records(evaluation), n).overlap(record(question))
    assert (overlap is not None) == contaminated(question, evaluation, n)
    if overlap is not None:
        assert overlap.passage in question
        assert overlap.passage in evaluation[int(overlap.record.removeprefix("eval-"))]


def test_the_longest_passage_is_the_one_that_is_named():
    words = [f"w{i}" for i in range(3 * SHORTEST_PASSAGE)]
    short, long = " ".join(words[:SHORTEST_PASSAGE]), " ".join(words[SHORTEST_PASSAGE + 1 : -1])
    index = EvaluationIndex(evaluation_records([short, long]))
    assert index.overlap(record(" ".join(words))) == Overlap("eval", "eval-1", long)


def test_symbols_case_and_white_space_do_not_hide_a_passage():
    train = "A train leaves the station at noon and travels north at sixty miles an hour until it stops"
    index = EvaluationIndex(evaluation_records([train], "gsm8k"))
    hidden = "Warm-up!\n(a) a TRAIN leaves the station, at noon -- and travels *north* at sixty miles / hour."
    passage = "a train leaves the station at noon and travels north at sixty miles"
    assert index.overlap(record(hidden)) == Overlap("gsm8k", "gsm8k-0", passage)
