"""Users' own rows: columns by field, chats, formats, data sets of the hub, and errors with file, row and column."""

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
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import CocaError, DataError
from coca_mindspeed.local.validation import load_data

COLUMNS = {"question": "problem", "answer": "solution"}
CHAT = {"messages": "messages"}
ROWS = [{"problem": "1 + 1?", "solution": 2, "level": 1}, {"problem": "2 + 2?", "solution": 4.0, "level": 2}]


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
    records = read(write(tmp_path / name, ROWS), COLUMNS)
    answers = ["2", "4.0" if name == "own.csv" else "4"]  # a CSV file holds text
    assert [(r.question, r.answer, r.dataset) for r in records] == [
        ("1 + 1?", answers[0], "own"), ("2 + 2?", answers[1], "own"),
    ]  # fmt: skip


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
    values = [np.float16(value) if kind == pa.float16() else value, value]
    array = (
        pa.array(values[1:] * 2, kind.value_type).dictionary_encode() if category else pa.array(values[:1] * 2, kind)
    )
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

    class Rows(list):
        column_names = ("problem", "solution", "level")
        features = SimpleNamespace(arrow_schema=pa.schema({"solution": pa.float32(), "level": pa.int64()}))

        def select_columns(self, names):
            return [{name: row[name] for name in names} for row in self]

    def load(*names, **settings):
        asked.append((*names, settings))
        return Rows([ROWS[0], {**ROWS[1], "solution": 4.099999904632568}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    records = read("org/sums:easy:test", COLUMNS)
    assert [(r.dataset, r.answer) for r in records] == [("org/sums", "2"), ("org/sums", "4.1")]
    assert asked[0] == ("org/sums", "easy", {"split": "test"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CocaError, match="pip install"):
        read("org/sums", COLUMNS)


def test_prepare_converts_columns_for_the_other_engines(tmp_path):
    path, output = write(tmp_path / "own.csv", ROWS), tmp_path / "out"
    prepare = ["data", "prepare", "--input", path, "--output", str(output), "--columns", json.dumps(COLUMNS)]
    assert main([*prepare[:2], "records", *prepare[2:]]) == 0
    assert sorted(record.question for record in read_records(output / "train.jsonl")) == ["1 + 1?", "2 + 2?"]
    assert main([*prepare[:2], "gsm8k", *prepare[2:], "--overwrite"]) == 2


@pytest.mark.parametrize("columns", [{"question": "question", "answer": "solution"}, {}])
@pytest.mark.parametrize("name", ["own.csv", "own.parquet", "own.jsonl"])
def test_a_missing_column_lists_those_of_the_file_and_the_key(tmp_path, capsys, name, columns):
    path = write(tmp_path / name, ROWS)
    argv = ["data", "prepare", "records", "--input", path, "--output", str(tmp_path / "out")]
    assert main([*argv, "--columns", json.dumps(columns)] if columns else argv) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{path}:1" in error
    assert all(word in error for word in ("'question'", "'problem'", "'solution'", "'level'", "data.columns"))
