"""Every supported format and the hub, row numbers in errors, and what cannot be read."""

import csv
import gzip
import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.formats import data_files, hub_rows, read_rows
from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.registry import SOURCES
from coca_mindspeed.errors import DataError, MissingDependencyError
from tests.data import source_rows

ROWS = [
    {"problem": "1 + 1?", "answer": "2", "note": "naïve, 数学"},
    {"problem": 'two\nlines and "quotes", commas', "answer": "-1", "note": ""},
    {"problem": "x\ty", "answer": "½", "note": "z"},
]


def write_jsonl(path, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))


def write_csv(path, opener=open):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
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
    "UPPER.PARQUET": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p),
}


@pytest.mark.parametrize("name", WRITERS)
def test_reads_what_was_written(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = list(read_rows(tmp_path / name))
    assert [dict(row.values) for row in rows] == ROWS
    expected = [2, 4, 6] if "lines" in name or "jsonl" in name else [1, 2, 3]
    assert [row.number for row in rows] == expected
    assert {row.file for row in rows} == {str(tmp_path / name)}


def test_parquet_is_read_only_where_asked(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet", columns=frozenset({"answer", "absent"}))
    assert [dict(row.values) for row in rows] == [{"answer": row["answer"]} for row in ROWS]


def test_a_broken_row_is_one_bad_row(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n\n4,5\n")
    assert [row.error for row in read_rows(tmp_path / "a.csv")] == [
        "",
        "expected 2 columns, found 3 (in line 3 of the file)",
        "",
    ]
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
        ("a.csv", b"a,b\n\xff,1\n", "row 0"),
        ("a.csv", b'a,b\n1,2\n"open', "row 1"),
        ("a.json", b"[\xff]", "utf-8"),
        ("a.json", b'[{"a": 1}, {"a": }]', "column 18"),
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

    @property
    def column_names(self):
        return list(self[0])

    @property
    def features(self):
        return SimpleNamespace(arrow_schema=pa.Table.from_pylist(self).schema)

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
