"""Every format and the hub, users' own columns and chats, and errors with file, row and column."""

import csv
import gzip
import json
import sys
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.schema import DataConfig
from coca_mindspeed.data.formats import data_files, hub_rows, read_rows
from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.registry import SOURCES
from coca_mindspeed.errors import CocaError, DataError, MissingDependencyError
from coca_mindspeed.local.inputs import load_data
from tests.data import source_rows

ROWS = [
    {"problem": "1 + 1?", "answer": "2", "note": "naïve, 数学"},
    {"problem": 'two\nlines and "quotes", commas', "answer": "-1", "note": ""},
    {"problem": "x\ty", "answer": "½", "note": "z"},
]


def write_jsonl(path, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))


def write_csv(path, opener=open, delimiter=","):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS = {
    "a.parquet": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p),
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": lambda p: write_jsonl(p, gzip.open),
    "lines.json": write_jsonl,
    "array.json": lambda p: p.write_text(json.dumps(ROWS)),
    "indented.json": lambda p: p.write_text(json.dumps(ROWS, indent=2)),
    "wrapped.json": lambda p: p.write_text(json.dumps({"Data": ROWS, "Version": 1.0}, indent=4)),
    "array.json.gz": lambda p: p.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "bom.csv": lambda p: (write_csv(p), p.write_bytes(b"\xef\xbb\xbf" + p.read_bytes())),
    "a.csv": write_csv,
    "a.csv.gz": lambda p: write_csv(p, opener=gzip.open),
    "a.tsv": lambda p: write_csv(p, delimiter="\t"),
    "UPPER.PARQUET": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p),
}


@pytest.mark.parametrize("name", WRITERS)
def test_reads_what_was_written(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = list(read_rows(tmp_path / name))
    assert [dict(row.values) for row in rows] == ROWS
    by_line = "lines" in name or "jsonl" in name
    assert [row.number for row in rows] == ([2, 4, 6] if by_line else [1, 2, 3])
    # The second row of the CSV file holds a line break.
    assert [row.line for row in rows] == ([2, 4, 6] if by_line else [2, 3, 5] if "sv" in name else [0, 0, 0])
    assert {row.file for row in rows} == {str(tmp_path / name)}


def test_parquet_is_read_only_where_asked(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet", columns=frozenset({"answer", "absent"}))
    assert [dict(row.values) for row in rows] == [{"answer": row["answer"]} for row in ROWS]


def test_nested_narrow_floats_are_their_shortest_decimals(tmp_path):
    kind = pa.struct({"rate": pa.float32(), "all": pa.list_(pa.float32()), "pairs": pa.large_list(pa.list_(pa.int8()))})
    rows = [{"metadata": {"rate": 0.3, "all": [0.1, None], "pairs": [[1]]}}, {"metadata": None}]
    pq.write_table(pa.table({"metadata": pa.array([row["metadata"] for row in rows], kind)}), tmp_path / "a.parquet")
    assert [dict(row.values) for row in read_rows(tmp_path / "a.parquet")] == rows


def test_a_broken_row_is_one_bad_row(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n\n4,5\n")
    rows = list(read_rows(tmp_path / "a.csv"))
    assert [(row.line, row.error) for row in rows] == [(2, ""), (3, "expected 2 columns, found 3"), (5, "")]
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": \n[1]\n"\xff"\n{"a": 2}\n')
    rows = list(read_rows(tmp_path / "a.jsonl"))
    assert [(row.number, bool(row.error)) for row in rows] == [(1, False), (2, True), (3, True), (4, True), (5, False)]
    assert "expected a JSON object, found list" in rows[2].error
    assert rows[1].where == f"{tmp_path / 'a.jsonl'}:2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not really", "row 0"),
        ("a.jsonl.gz", b"not gzip", ""),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], ""),
        ("a.csv", b"", "header"),
        ("a.csv", b"answer,question,answer\n1,2,3\n", "'answer'.*1, 3"),  # the last one would win
        ("a.tsv", b"b\tb\n1\t2\n", "'b'"),
        ("a.csv", b"id;confidence;correct\n1;0,5;1\n", "semicolons"),
        ("a.csv", b"id\tcorrect\n1\t1\n", "tabs; name it .tsv"),
        ("a.tsv", b"id,correct\n1,1\n", "commas"),
        ("a.csv", b"a,b\n\xff,1\n", "line 0"),
        ("a.csv", b'a,b\n1,2\n"open', "line 2"),
        ("a.json", b"[\xff]", "utf-8"),
        ("a.json", b'[{"a": 1},\n {"a": }]', ":2: .*column 8"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "column 11"),
    ],
)
def test_a_file_that_cannot_be_read_says_so(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        list(read_rows(tmp_path / name))


def test_directories_stand_for_their_data_files_in_order(tmp_path):
    for name in ("train-00001-of-00002.parquet", "train-00000-of-00002.parquet", "README.md", "state.bin"):
        (tmp_path / name).touch()
    assert [path.name for path in data_files([tmp_path])] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]


@pytest.mark.parametrize("name", ["none.jsonl", "a.xlsx", "a.parquet.gz", "empty"])
def test_inputs_that_are_no_data(tmp_path, name):
    (tmp_path / "a.xlsx").touch()
    (tmp_path / "a.parquet.gz").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=name):
        data_files([tmp_path / name])


class Rows(list):
    """A data set of the hub, as far as it is used."""

    schema = None

    @property
    def column_names(self):
        return list(self[0])

    @property
    def features(self):
        return SimpleNamespace(arrow_schema=self.schema or pa.Table.from_pylist(self).schema)

    def select_columns(self, columns):
        return [{column: row[column] for column in columns} for row in self]


@pytest.fixture
def hub(monkeypatch):
    """Replace the package; record the calls."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options["split"]))
        return Rows([source_rows.TRIVIAQA_HUB])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_prepare_by_name(hub, tmp_path, capsys):
    assert main(["data", "prepare", "triviaqa", "--hub", "--output", str(tmp_path / "out")]) == 0
    assert next(read_records(tmp_path / "out" / "test.jsonl")).answer == "Mars"
    assert main(["data", "prepare", "triviaqa", "--hub", "my/copy:conf:dev", "--output", str(tmp_path / "2")]) == 0
    assert hub == [
        ("mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation"),
        ("my/copy", "conf", "dev"),
    ]
    assert main(["data", "prepare", "records", "--hub", "--output", str(tmp_path / "3")]) == 2
    assert "--hub" in capsys.readouterr().err


def test_the_hub_without_a_network_or_the_package(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"openai/gsm8k/main/test: .*ConnectionError: .*--input"):
        next(hub_rows(SOURCES["gsm8k"].hub))
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import raises ImportError
    with pytest.raises(MissingDependencyError, match="datasets"):
        next(hub_rows(SOURCES["gsm8k"].hub))


COLUMNS = {"question": "problem", "answer": "solution"}
CHAT = {"messages": "messages"}
OWN_ROWS = [{"problem": "1 + 1?", "solution": 2, "level": 1}, {"problem": "2 + 2?", "solution": 4.0, "level": 2}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in (rows[0], *(row.values() for row in rows))) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, columns):
    return load_data(DataConfig(name="records", train=path, evaluate=path, columns=columns))[0]


@pytest.mark.parametrize("name", ["own.csv", "own.parquet", "own.jsonl"])
def test_columns_of_every_format(tmp_path, name):
    records = read(write(tmp_path / name, OWN_ROWS), COLUMNS)
    answers = ["2", "4.0" if name == "own.csv" else "4"]  # a CSV file holds text
    assert [(r.question, r.answer, r.dataset) for r in records] == [
        ("1 + 1?", answers[0], "own"), ("2 + 2?", answers[1], "own"),
    ]  # fmt: skip


def test_the_held_out_file_may_have_columns_of_its_own(tmp_path):
    train = write(tmp_path / "own.csv", OWN_ROWS)
    evaluate = write(tmp_path / "theirs.parquet", [{"Problem": "3 + 3?", "Answer": 6}])
    names = {"train": train, "columns": COLUMNS, "evaluate": evaluate}
    own = {"question": "Problem", "answer": "Answer"}
    _, [record] = load_data(DataConfig(name="records", **names, evaluate_columns=own))
    assert (record.question, record.answer) == ("3 + 3?", "6")
    with pytest.raises(DataError, match=r"theirs\.parquet"):
        load_data(DataConfig(name="records", **names))


@pytest.mark.parametrize(
    ("kind", "value", "answer"),
    [
        (pa.float32(), 19.99, "19.99"), (pa.float32(), 1e-7, "0.0000001"), (pa.float32(), 16777216.0, "16777216"),
        (pa.float32(), 1e30, "1" + "0" * 30), (pa.float32(), -0.0, "0"), (pa.float16(), 0.1, "0.1"),
        (pa.float64(), 19.989999771118164, "19.989999771118164"), (pa.float64(), 1e23, "1" + "0" * 23),
        (pa.float64(), -5.0, "-5"), (pa.int8(), 7, "7"), (pa.string(), "19.990", "19.990"),
        (pa.decimal128(10, 2), Decimal("19.90"), "19.9"), (pa.decimal128(10, 2), Decimal("100.00"), "100"),
        (pa.decimal256(40, 0), Decimal("1" * 30), "1" * 30),
        (pa.dictionary(pa.int8(), pa.float32()), 0.3, "0.3"),
    ],
)  # fmt: skip
def test_a_number_is_the_shortest_decimal_of_its_column(tmp_path, kind, value, answer):
    category = pa.types.is_dictionary(kind)  # as pandas writes it
    values = [np.float16(value) if kind == pa.float16() else value] * 2
    array = pa.array(values, kind.value_type).dictionary_encode() if category else pa.array(values, kind)
    pq.write_table(pa.table({"problem": ["1", "2"], "solution": array}), tmp_path / "own.parquet")
    assert [record.answer for record in read(str(tmp_path / "own.parquet"), COLUMNS)] == [answer, answer]


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.parquet"])
def test_chats(tmp_path, name):
    rows = [{"messages": [user("2 + 2?"), says("assistant", "4")], "gold": "four"}] * 2
    path = write(tmp_path / name, rows)
    assert [(r.question, r.answer) for r in read(path, CHAT)] == [("2 + 2?", "4")] * 2
    assert [r.answer for r in read(path, {**CHAT, "answer": "gold"})] == ["four"] * 2
    chat = [says("system", "Be brief."), *rows[0]["messages"]]
    path = write(tmp_path / name, [{"messages": chat}] * 2)
    assert [(r.system, r.question) for r in read(path, CHAT)] == [("Be brief.", "2 + 2?")] * 2


@pytest.mark.parametrize(
    ("row", "columns", "column"),
    [
        ({"problem": "?", "level": 1}, COLUMNS, "solution"), ({"problem": "", "solution": "1"}, COLUMNS, "problem"),
        ({"problem": "?", "solution": [1]}, COLUMNS, "solution"),
        ({"problem": "?", "solution": None}, COLUMNS, "solution"),
        ({"messages": "hello"}, CHAT, "messages"), ({"messages": [{"from": "human"}]}, CHAT, "messages"),
        ({"messages": [user("?"), says("system", "Be brief."), says("assistant", "1")]}, CHAT, "messages"),
        ({"messages": [says("system", "a"), says("system", "b"), user("?")]}, CHAT, "messages"),
        ({"messages": [user("a"), says("assistant", "b"), user("c"), says("assistant", "d")]}, CHAT, "messages"),
        ({"messages": [says("assistant", "b")]}, CHAT, "messages"), ({"messages": [user("?")]}, CHAT, "answer"),
        ({"messages": [user("?"), says("assistant", 4)]}, CHAT, "messages"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(tmp_path, row, columns, column):
    good = {"problem": "?", "solution": "1", "messages": [user("?"), says("assistant", "1")]}
    path = write(tmp_path / "own.jsonl", [good, row])
    with pytest.raises(DataError) as refused:
        read(path, columns)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert repr(column) in str(refused.value)


@pytest.mark.parametrize("columns", [{"question": "problem"}, {"questions": "problem", "answer": "a"}, {"id": "a"}])
def test_mappings_that_are_refused(tmp_path, capsys, columns):
    named = ",".join(f"{name}: {column}" for name, column in columns.items())
    assert main(["check", "local", "model.path=x", "data.train=x.csv", f"data.columns={{{named}}}"]) == 2
    assert "data.columns" in capsys.readouterr().err


def test_a_data_set_of_the_hub(monkeypatch, tmp_path, capsys):
    asked = []

    def load(*names, split):
        asked.append((*names, split))
        rows = Rows([OWN_ROWS[0], {**OWN_ROWS[1], "solution": 4.099999904632568}])
        rows.schema = pa.schema({"solution": pa.float32(), "level": pa.int64()})
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    records = read("org/sums:easy:test", COLUMNS)
    assert [(r.dataset, r.answer) for r in records] == [("org/sums", "2"), ("org/sums", "4.1")]
    assert asked[0] == ("org/sums", "easy", "test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CocaError, match="pip install"):
        read("org/sums", COLUMNS)


def test_prepare_converts_columns_for_the_other_engines(tmp_path):
    path, output = write(tmp_path / "own.csv", OWN_ROWS), tmp_path / "out"
    prepare = ["data", "prepare", "--input", path, "--output", str(output), "--columns", json.dumps(COLUMNS)]
    assert main([*prepare[:2], "records", *prepare[2:]]) == 0
    assert sorted(record.question for record in read_records(output / "train.jsonl")) == ["1 + 1?", "2 + 2?"]
    assert main([*prepare[:2], "gsm8k", *prepare[2:], "--overwrite"]) == 2


@pytest.mark.parametrize("columns", [{"question": "question", "answer": "solution"}, {}])
@pytest.mark.parametrize("name", ["own.csv", "own.parquet", "own.jsonl"])
def test_a_missing_column_lists_those_of_the_file_and_the_key(tmp_path, capsys, name, columns):
    path = write(tmp_path / name, OWN_ROWS)
    argv = ["data", "prepare", "records", "--input", path, "--output", str(tmp_path / "out")]
    assert main([*argv, "--columns", json.dumps(columns)] if columns else argv) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert {"own.csv": f"{path}:2: ", "own.jsonl": f"{path}:1: ", "own.parquet": f"{path}: row 1: "}[name] in error
    assert all(word in error for word in ("'question'", "'problem'", "'solution'", "'level'", "data.columns"))
