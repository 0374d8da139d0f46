"""Records: round trip, defaults, errors by file and line, and files that would break a parser or fill the memory."""

import gzip
import json

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record, read_records, record_from_json, write_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils import text_formats as json_text
from coca_mindspeed.utils.json_files import read_json_lines

GOOD = '{"question": "1 + 1?", "answer": "2"}'


def with_metadata(text):
    return f'{{"question": "q", "answer": "1", "metadata": {{{text}}}}}'


HOSTILE = {
    "a 5,000-digit integer": (with_metadata('"n": ' + "9" * 5000), "4300 digits"),
    "nesting beyond the parser": (with_metadata('"n": ' + "[" * 90_000 + "]" * 90_000), "100 levels"),
    "nesting beyond a copy": (with_metadata('"n": ' + '{"a":' * 400 + "1" + "}" * 400), "100 levels"),
    "a difficulty in words": (with_metadata('"difficulty": "hard"'), "'hard'"),
    "a difficulty out of range": (with_metadata('"difficulty": 3'), "int 3"),
    "a difficulty of NaN": (with_metadata('"difficulty": NaN'), "float nan"),
    "no answer": ('{"question": "q"}', "'answer'"),
    "a truth value as answer": ('{"question": "q", "answer": true}', "'answer'"),
    "a list as answer": ('{"question": "q", "answer": [3]}', "'answer'"),
    "an answer of NaN": ('{"question": "q", "answer": NaN}', "'answer'"),
    "a blank question": ('{"question": " ", "answer": "3"}', "'question'"),
    "an unknown field": ('{"question": "q", "answer": "a", "anwser": "b"}', "'anwser'"),
    "half a line": ('{"question"', "delimiter at column 12"),
    "a list": ("[1]", "list"),
    "an instruction of null": (with_metadata('"instruction": null'), "metadata['instruction']"),
}
SURROGATE = '{"question": "half \\ud800 pair", "answer": "1"}'


@pytest.fixture(params=HOSTILE)
def hostile(request, tmp_path):
    line, message = HOSTILE[request.param]
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD.replace('1 + 1', '1 + 2')}\n")
    return path, message


def prepare(path, *options):
    arguments = ["data", "prepare", "records", "--input", path, "--output", path.parent / "out"]
    return main([*map(str, arguments), "--gold", "off", *options])


def test_every_command_names_the_line(hostile, capsys):
    path, message = hostile
    with pytest.raises(DataError, match=r"mine\.jsonl:2: ") as caught:
        list(read_records(path))
    assert message in str(caught.value)
    assert prepare(path) == 1
    [line] = filter(None, capsys.readouterr().err.splitlines())  # rich 13 ends its bar by an empty line
    assert f"{path}:2: " in line
    assert message in line
    assert prepare(path, "--skip-bad", "1") == 0
    assert len(list(read_records(path.parent / "out/train.jsonl"))) == 2
    (finding,) = map(json.loads, (path.parent / "out/findings.jsonl").read_text().splitlines())
    assert (finding["check"], finding["row"]) == ("malformed", 2)
    assert message in finding["detail"]


def test_half_of_a_surrogate_pair(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD}\n{SURROGATE}\n")
    with pytest.raises(DataError, match=r"mine\.jsonl:2: .*'\\ud800'"):
        list(read_records(path))
    assert prepare(path) == 0  # a row that JSON Lines cannot hold is listed like any other
    (finding,) = map(json.loads, (tmp_path / "out/findings.jsonl").read_text().splitlines())
    assert finding["row"] == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_byte_order_mark_is_no_text_at_the_beginning_alone(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    content = f"\ufeff{GOOD}\n".encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    assert prepare(path) == 0
    if suffix == ".jsonl":
        assert [record.answer for record in read_records(path)] == ["2"]
        path.write_text(f"{GOOD}\n\ufeff{GOOD}\n")
        with pytest.raises(DataError, match=":2: "):
            list(read_json_lines(path))


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr(json_text, "LONGEST_LINE", len(GOOD) + 1)


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, short_lines, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:-1]}  }}\n{GOOD}\n")
    assert prepare(path) == 1
    assert f"{path}:2: longer than" in capsys.readouterr().err
    assert prepare(path, "--skip-bad", "1") == 0
    with pytest.raises(DataError, match=r"mine\.jsonl:2: longer than"):
        list(read_json_lines(path))
    for end in ("", "\n"):
        path.write_text(f"{GOOD}\n{GOOD}{end}")
        assert len(list(read_json_lines(path))) == 2


def test_round_trip(tmp_path):
    records = [
        Record("a", "gsm8k", "math", "1+1?", "2"),
        Record("b", "humaneval", "code", "写代码\n", "", system="be brief", metadata={"tests": ["assert f() == 1"]}),
    ]
    write_records(tmp_path / "x.jsonl", records)
    assert list(read_records(tmp_path / "x.jsonl")) == records


def test_users_file_needs_only_question_and_answer(tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        '\n{"question": "q", "answer": "a"}\n{"id": 7, "question": "p", "answer": 4.0}'
    )
    assert list(read_records(tmp_path / "mine.jsonl")) == [
        Record("mine-2", "mine", "math", "q", "a"),
        Record("7", "mine", "math", "p", "4"),
    ]


@pytest.mark.parametrize(
    ("answer", "category"),
    [
        *(
            (words, "factual")
            for words in ("Athens", "New Delhi", "N'Djamena", "Port-au-Prince", "U.S. Congress", "北京")
        ),
        *((value, "math") for value in ("42", "x", "xy", "(A)", "a, b", r"\frac{1}{2}", "\\alpha", "αβ", "sin x")),
        *((number, "math") for number in ("5 apples", "18 dollars", "10 and 12", "3 hours", "50%", "$5$", "1990", "")),
        *((constant, "math") for constant in ("infinity", "-infinity", "Negative infinity.", "undefined")),
        *(
            (applied, "math")
            for applied in ("log x", "sin(x)", "Sin theta", "max(a, b)", "n log n", "log log n", "cos -x", "a mod n")
        ),
        *(
            (name, "factual")  # a function's name without an argument
            for name in (
                "Max Planck",
                "Max M. Warburg",
                "Sin City",
                "log cabin",
                "Tan France",
                "Min Yoon-gi",
                "Kim Min-a",
                "Mad Max",
                "Archimedes",
                "Infinity War",
                "Max (comics)",
                "Mod Squad",
                "the Log",
            )
        ),
        *(
            (date, "factual")
            for date in (
                "12 March 1990",
                "March 12, 1990",
                "July 4",
                "the 4th of July",
                "July 4th, 1776",
                "March 1990",
                "Monday, 12 Mar. 1990",
                "15 March 44 BC",
                "May of 1968",
            )
        ),
        *(
            (written, "factual")
            for written in ("1944-06-06", "3–1", "40 - 60", "2025/5/22", "192.168.0.1", "1914--1918")
        ),
        *((code, "factual") for code in ("A4", "CO2", "R2D2", "Q1")),
        *((number, "math") for number in ("-3", "1.5", "24/7", "12:30", "2x", "x2", "3C", "A", "-3-1", "1/2-1/3")),
        *((no_date, "math") for no_date in ("March 12 + 1", "12 marches", "4 July sales", "12 March 1990 km")),
    ],
)
def test_the_category_of_a_record_that_names_none(answer, category):
    assert record_from_json({"question": "q", "answer": answer}, "here", "mine", 1).category == category
    named = {"question": "q", "answer": answer, "category": "code"}
    assert record_from_json(named, "here", "mine", 1).category == "code"


def test_arithmetic_makes_a_record_mathematics():
    row = {"question": "q", "answer": "10-3", "metadata": {"arithmetic": True}}
    assert record_from_json(row, "here", "mine", 1).category == "math"
    with pytest.raises(DataError, match="arithmetic"):
        record_from_json({**row, "metadata": {"arithmetic": 1}}, "here", "mine", 1)


def test_an_id_is_used_once(tmp_path):
    (tmp_path / "bad.jsonl").write_text(f'{GOOD}\n{{"id": "bad-1", "question": "q", "answer": "a"}}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: .*'bad-1'.* 1"):
        list(read_records(tmp_path / "bad.jsonl"))
