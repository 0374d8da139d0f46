"""Which custom grader is refused because it does not tell a right answer from a wrong one."""

import pytest

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.algorithm.parsing import SHORT_ANSWER
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.scoring.probe import check_custom_grader, make_probe

GRADERS = """
def bare(record, answer): return answer.strip() == record.answer
def boxed(record, answer): return "boxed{" + record.answer + "}" in answer
def contains(record, answer): return record.answer in answer
def tagged(record, answer): return f"<answer>{record.answer}</answer>" in answer
def confident(record, answer): return "<confidence>" in answer and record.answer in answer
def always(record, answer): return True
def never(record, answer): return False
def nothing(record, answer): return None
def backwards(record, answer): return record.answer not in answer
def raises(record, answer): return float(answer) == float(record.answer)
"""


def record(answer, category="math", **fields):
    return Record(str(answer), fields.pop("dataset", "d"), category, "?", answer, **fields)


NUMBERS = [record("17"), record("23"), record("391")]


@pytest.fixture
def tried(tmp_path):
    """Try a grader; whether it was refused."""
    (tmp_path / "mine.py").write_text(GRADERS)

    def check(name, records, method="coca"):
        grader = build_grader(f"{tmp_path}/mine.py:{name}")
        try:
            check_custom_grader(grader, name, records, method_settings(method))
        except GradingError:
            return True
        finally:
            assert grader.metrics()["right"] == grader.metrics()["wrong"] == 0  # answers of no run
        return False

    return check


@pytest.mark.parametrize("method", ["coca", "rlcr", "caliber"])
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        *((name, False) for name in ("bare", "boxed", "contains", "raises")),
        *((name, True) for name in ("tagged", "confident", "always", "never", "nothing", "backwards")),
    ],
)
def test_graders_of_numbers(tried, name, refused, method):
    assert tried(name, NUMBERS, method) == refused


@pytest.mark.parametrize(
    ("name", "records", "refused"),
    [
        ("bare", [record("Athens", "factual"), record("Rome", "factual")], False),
        ("boxed", [record("Athens", "factual"), record("Rome", "factual")], True),  # the prompt asks for a short answer
        ("bare", [record("Athens", "factual")], False),
        ("always", [record("Athens", "factual")], True),
        ("contains", [record("1"), record("13"), record("2")], False),  # one of the wrong answers is enough
        ("always", [record("", "code"), record("4", dataset="simpleqa")], False),  # not tried
        ("always", [record("", "code"), record("4")], True),
    ],
)
def test_graders_of_other_records(tried, name, records, refused):
    assert tried(name, records) == refused


@pytest.mark.parametrize(
    ("records", "right", "wrong"),
    [
        (NUMBERS, "17", ["23", "391"]),
        ([record("f()", "code"), record("5", metadata={"grader": "simpleqa"}), *NUMBERS], "17", ["23", "391"]),
        ([record("Yes", "factual"), record("yes!", "factual"), record("No", "factual")], "Yes", ["No"]),
        ([record("0.5")], "0.5", ["1.5"]),
        ([record("90")], "90", ["00"]),
        ([record("-x")], "-x", ["-y"]),
        ([record("∅")], "∅", ["∅ 1"]),
    ],
)
@pytest.mark.parametrize(("method", "spaced"), [("coca", " {}"), ("rlcr", "{} "), ("caliber", " {} ")])
def test_answers_are_those_of_whole_responses(records, right, wrong, method, spaced):
    probe = make_probe(records, method_settings(method))
    assert [answer.strip() for answer in probe.forms[0]] == [right, *wrong]
    assert probe.forms[0][0].rstrip() == spaced.format(right).rstrip()


def test_without_text_there_is_no_probe():
    assert make_probe([], method_settings()) is make_probe([record("", "code")], method_settings()) is None
    assert len(make_probe([record("1", metadata={"instruction": SHORT_ANSWER})], method_settings()).forms) == 1
