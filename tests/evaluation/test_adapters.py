"""Predictions from plain responses with gold answers."""

import json
import re

import pytest

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.adapters import read_responses
from coca_mindspeed.grading.verdict import ExactGrader, Outcome, Verdict
from coca_mindspeed.utils.tokenization import TokenCounter, parse_and_count
from tests.tokenizers_for_tests import qwen_like


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def gold(tmp_path):
    records = [Record("a", "sums", "math", "1+1", "2"), Record("b", "sums", "math", "2+2", "4")]
    write_records(tmp_path / "gold.jsonl", records)
    return tmp_path / "gold.jsonl"


def test_responses_are_graded_without_their_confidence(tmp_path, gold):
    path = write(
        tmp_path / "r.jsonl",
        [
            {"id": "b", "response": "<confidence>0.7</confidence> 4"},
            {"id": "a", "response": "3", "confidence": 0.1, "tokens_to_confidence": 160},
            {"id": "b", "response": "<confidence>70%</confidence> 4"},
        ],
    )
    rows = read_responses(path, gold, ExactGrader())
    assert [(p.id, p.sample, p.confidence, p.correct) for p in rows] == [
        ("b", 0, 0.7, True),
        ("a", 0, 0.1, False),
        ("b", 1, None, False),
    ]
    assert rows[1].tokens_to_confidence == 160
    assert (rows[0].gold, rows[0].category, rows[0].question) == ("4", "math", "2+2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "c", "response": "4"}], r"r\.jsonl:1: .*'c'"),
        ([{"id": "a"}], r"r\.jsonl:1: .*'response'"),
        ([{"id": "a", "response": "2"}], '1 of 2 .*"b"'),
    ],
)
def test_bad_responses_are_refused(tmp_path, gold, rows, message):
    with pytest.raises(DataError, match=message):
        read_responses(write(tmp_path / "r.jsonl", rows), gold, ExactGrader())


def test_answers_that_cannot_be_graded_are_refused_unless_they_are_rare(tmp_path):
    class Undecided(ExactGrader):
        def __init__(self, count):
            self._count = count

        def grade(self, records, answers):
            decided = [Verdict(Outcome.RIGHT)] * (len(answers) - self._count)
            return [*[Verdict(Outcome.UNGRADABLE, "no parse")] * self._count, *decided]

    write_records(tmp_path / "gold.jsonl", [Record(str(i), "sums", "math", "1+1", "2") for i in range(100)])
    path = write(tmp_path / "r.jsonl", [{"id": str(i), "response": "2"} for i in range(100)])
    found = read_responses(path, tmp_path / "gold.jsonl", Undecided(1))
    assert [p.correct for p in found] == [None] + [True] * 99
    with pytest.raises(DataError, match=r"r\.jsonl:1: 2 of 100 .*no parse"):
        read_responses(path, tmp_path / "gold.jsonl", Undecided(2))


def test_tokens_are_counted_to_the_end_of_the_confidence(tmp_path):
    fast, tokenizer = qwen_like(), tmp_path / "tokenizer"
    fast.save_pretrained(tokenizer)
    counter, parser = TokenCounter(tokenizer), ResponseParser()
    stated = "<confidence>0.85</confidence>"
    text = f"{stated}\nThe answer is 数学"
    ids = fast(text)["input_ids"]
    # Brute force over prefixes: the first that decodes to the closing tag.
    expected = next(n for n in range(1, len(ids) + 1) if fast.decode(ids[:n]).startswith(stated))
    assert parse_and_count(text, parser, counter)[1] == expected
    assert fast.decode(ids[:expected]).endswith(">\n")  # the straddling token counts
    assert parse_and_count("nothing", parser, counter)[1] is None
    text = "42 <confidence>1</confidence> \n"
    assert parse_and_count(text, ResponseParser("last"), counter)[1] == counter.before(text, len(text) - 2)
    for directory in (tokenizer / "no", tokenizer.parent):
        with pytest.raises(DataError, match=re.escape(str(directory))):
            TokenCounter(directory)
