"""Records: round trip, defaults, and errors that name file and line."""

import pytest

from coca_mindspeed.data.records import Record, read_records, record_from_json, write_records
from coca_mindspeed.errors import DataError


def test_round_trip(tmp_path):
    records = [
        Record("a", "gsm8k", "math", "1+1?", "2"),
        Record("b", "humaneval", "code", "写代码\n", "", system="be brief", metadata={"tests": ["assert f() == 1"]}),
    ]
    write_records(tmp_path / "x.jsonl", records)
    assert list(read_records(tmp_path / "x.jsonl")) == records


def test_users_file_needs_only_question_and_answer(tmp_path):
    (tmp_path / "mine.jsonl").write_text('\n{"question": "q", "answer": "a"}\n')
    assert list(read_records(tmp_path / "mine.jsonl")) == [Record("mine-2", "mine", "math", "q", "a")]


@pytest.mark.parametrize(
    ("answer", "category"),
    [
        *(
            (words, "factual")
            for words in ("Athens", "New Delhi", "N'Djamena", "Port-au-Prince", "U.S. Congress", "北京")
        ),
        *((value, "math") for value in ("42", "x", "xy", "(A)", "a, b", r"\frac{1}{2}", "\\alpha", "αβ", "sin x")),
        *((number, "math") for number in ("5 apples", "July 4", "50%", "$5$", "infinity", "log x", "")),
    ],
)
def test_the_category_of_a_record_that_names_none(answer, category):
    assert record_from_json({"question": "q", "answer": answer}, "here", "mine", 1).category == category
    named = {"question": "q", "answer": answer, "category": "code"}
    assert record_from_json(named, "here", "mine", 1).category == "code"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q"}', r"bad\.jsonl:1: .*'answer'"),
        ('{"question": "q", "answer": 3}', r"bad\.jsonl:1: .*'answer'.* 3"),
        ('{"question": " ", "answer": "3"}', r"bad\.jsonl:1: .*'question'"),
        ('{"question": "q", "answer": "a", "anwser": "b"}', r"bad\.jsonl:1: .*'anwser'"),
        ('{"question": "q", "answer": "a"}\n{"question"', r"bad\.jsonl:2: "),
        ("[1]", r"bad\.jsonl:1: .*list"),
        (
            '{"id": "x", "question": "q", "answer": "a"}\n{"id": "x", "question": "r", "answer": "a"}',
            r"bad\.jsonl:2: .*'x'.* 1",
        ),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / "bad.jsonl"))
