"""Answers behind a thought: the parser gives the graders the text behind ``</think>`` alone."""

import json
from contextlib import closing

import pytest

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.unevaluated import why_unevaluated
from coca_mindspeed.grading.verdict import Outcome
from tests.grading.sandbox_package import needs_sandbox
from tests.grading.tables import read_table

CASES = read_table("thoughts.tsv")
STATED = "<confidence> 0.83 </confidence>"
RECORDS = {
    "math": Record("1", "math500", "math", "What is 12+30?", "42"),
    "exact": Record("1", "arithmetic", "math", "12+30", "42"),
    "factual": Record("1", "triviaqa", "factual", "What is the capital of France?", "Paris", {"aliases": ["Paris"]}),
    "code": Record(
        "1",
        "mbpp",
        "code",
        "Write add(a,b)",
        "",
        metadata={"tests": {"kind": "asserts", "code": "assert add(1,2)==3"}},
    ),
}
_TEXTS = [("math", None), ("exact", None)]
_TEXTS += [("factual", {"match": rule}) for rule in ("sentence", "exact", "contains")]


@pytest.mark.parametrize(
    ("kind", "options", "position"),
    [
        *((*each, position) for each in _TEXTS for position in ("first", "last", "both")),
        pytest.param("code", None, "first", marks=needs_sandbox),
    ],
)
def test_only_the_text_behind_the_thought_is_graded(kind, options, position):
    cases = [(text, verdict) for grader, text, verdict in CASES if grader == kind]
    responses = [_response(text, position) for text, _ in cases]
    parsed = [ResponseParser(position, thinking=True, in_training=True)(response) for response in responses]
    for case, each in zip(cases, parsed, strict=True):
        closed = "</think>" in case[0]
        assert each.confidence == (0.83 if closed or position != "last" else None)
        assert each.confidence_after == (0.83 if closed and position == "both" else None)
    with closing(build_grader(kind, options)) as grader:
        verdicts = grader.grade([RECORDS[kind]] * len(cases), [each.answer for each in parsed])
    assert [(text, verdict.outcome) for (text, _), verdict in zip(cases, verdicts, strict=True)] == [
        (text, Outcome(verdict)) for text, verdict in cases
    ]


def _response(text, position):
    if position != "last":
        tag = "<think>" if text.startswith("<think>") else ""
        text = tag + STATED + text.removeprefix(tag)
    return text if position == "first" else f"{text} {STATED}"


@pytest.mark.parametrize(
    ("text", "is_evaluated"),
    [
        ("It is $\\sum_{k=1}^4 k = \\boxed{10}$\n</think>\n\n\\boxed{10}", True),
        ("$\\boxed{\\sum_{k=1}^{4} k}$\n</think>\n\n10", True),
        ("10\n</think>\n\n$\\boxed{\\sum_{k=1}^{4} k}$", False),
    ],
)
def test_a_box_of_the_thought_is_not_left_to_evaluate(text, is_evaluated):
    answer = ResponseParser(thinking=True)(STATED + text).answer
    assert (not why_unevaluated("Compute $\\sum_{k=1}^{4} k$.", "10", answer)) == is_evaluated


def test_a_long_thought_takes_no_part_in_the_answers_length():
    answer = ResponseParser(thinking=True)(STATED + "so " * 5000 + "</think>Paris").answer
    assert answer == "Paris"


@pytest.mark.parametrize("order", ["{stated}\n", "<think>\n{stated}\n", "{stated}\n<think>\n"])
def test_evaluate_reads_responses_with_thoughts(tmp_path, capsys, order):
    head = order.format(stated="<confidence> 0.8 </confidence>")
    facts = [("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Peru", "Lima")]
    rows = [
        {"id": f"f{i}", "dataset": "facts", "category": "factual", "question": f"Capital of {land}?", "gold": city}
        | {"response": f"{head}Let me recall the country's largest city.\n</think>\n\n{city}"}
        for i, (land, city) in enumerate(facts)
    ] + [
        {"id": f"m{i}", "dataset": "sums", "category": "math", "question": f"What is {i}+40?", "gold": str(i + 40)}
        | {
            "response": f"{head}So \\boxed{{{i + 40}}}. "
            + ("</think>\n\nThe answer is 7." if i < 2 else "Let me check")
        }
        for i in range(4)
    ]
    responses, output = tmp_path / "responses.jsonl", tmp_path / "out"
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["evaluate", str(responses), "--thinking", "--output", str(output)]) == 0
    predictions = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    assert [row["correct"] for row in predictions] == [True] * 4 + [False] * 4
    assert {row["confidence"] for row in predictions} == {0.8}
