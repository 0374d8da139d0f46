"""The strict parser, case by case and against properties."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG, ParsedResponse, ResponseParser, parse_response


@pytest.mark.parametrize(
    ("number", "value"),
    [("0", 0.0), ("1", 1.0), ("1.0", 1.0), ("1.000", 1.0), (".5", 0.5), ("0.85", 0.85), ("0.3333333333333333", 1 / 3)],
)
@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_plain_decimals_in_the_unit_interval_are_valid(number, value, space):
    parsed = ResponseParser()(f" \n<confidence>{space}{number}{space}</confidence> the answer")
    assert parsed.confidence == value
    assert parsed.answer == " the answer"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        *(
            f"<confidence>{inside}</confidence> a"
            for inside in (
                *("", " ", " 85% ", " 1.01 ", " 2 ", " -0.5 ", " +0.5 ", " 1e-1 ", " nan ", " inf ", " 0.5 0.6 "),
                *(" 0.5.1 ", " 0,5 ", " . ", " 1. ", " 00.5 ", " 0_5 "),
                " ０.５ ",  # full-width digits
                " ٠.٥ ",  # Arabic-Indic digits, which float() would read
                "\u00a00.5",  # a no-break space is not ASCII white space
            )
        ),
        "<confidence> 0.5 a",
        "0.5 </confidence> a",
        "<Confidence> 0.5 </Confidence> a",
        "<confidence> 0.5 </ confidence> a",
        "sure: <confidence> 0.5 </confidence> a",
        "a <confidence> 0.5 </confidence>",
        "<confidence><confidence> 0.5 </confidence> a",
        "<confidence> x </confidence><confidence> 0.5 </confidence> a",
    ],
)
def test_anything_else_is_invalid_and_the_answer_is_the_whole_text(text):
    parsed = ResponseParser()(text)
    assert parsed.confidence is None
    assert parsed.answer == text


def test_only_the_first_pair_counts():
    parsed = ResponseParser()("<confidence>0.2</confidence>x<confidence>0.9</confidence>")
    assert parsed.confidence == 0.2
    assert parsed.answer == "x<confidence>0.9</confidence>"


def test_fixed_width():
    parse = ResponseParser(decimals=2)
    assert parse("<confidence> 0.50 </confidence> a").confidence == 0.5
    assert parse("<confidence>1.00</confidence> a").confidence == 1.0
    for other in ("0.5", "0.500", "1", ".50", "1.01", "0.0"):
        assert parse(f"<confidence>{other}</confidence> a").confidence is None, other


@pytest.mark.parametrize(
    ("text", "confidence", "answer"),
    [
        ("so 42 <confidence> 0.7 </confidence>\n", 0.7, "so 42 "),
        ("<confidence>0.1</confidence> 42 <confidence>0.7</confidence>", 0.7, "<confidence>0.1</confidence> 42 "),
        ("<confidence>0.7</confidence>", 0.7, ""),
        ("42 <confidence>0.7</confidence> and more", None, None),
        ("42 <confidence>0.7", None, None),
        ("42 <confidence>0.7</confidence><confidence>7</confidence>", None, None),
    ],
)
def test_answer_first(text, confidence, answer):
    parsed = ResponseParser(position="last")(text)
    assert parsed.confidence == confidence
    assert parsed.answer == (text if answer is None else answer)


@given(st.text(alphabet="<confide/c> 01.5\nx", max_size=60))
def test_valid_means_that_the_grammar_matches_and_nothing_is_lost(text):
    parsed = ResponseParser()(text)
    assert text.endswith(parsed.answer)
    if parsed.confidence is not None:
        head = text[: len(text) - len(parsed.answer)]
        inside = re.fullmatch(rf"\s*{OPEN_TAG}\s*(\S+)\s*{CLOSE_TAG}", head)
        assert inside is not None
        assert 0.0 <= float(inside[1]) == parsed.confidence <= 1.0


def test_one_decimal_and_the_function_of_the_package():
    assert parse_response("<confidence>0.5</confidence>x", decimals=1) == ParsedResponse(0.5, "x")
    assert parse_response("<confidence>0.55</confidence>x", decimals=1).confidence is None
    assert parse_response("x<confidence>.5</confidence>", position="last") == ParsedResponse(0.5, "x")


@pytest.mark.parametrize("arguments", [{"position": "middle"}, {"decimals": 0}])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="should be"):
        ResponseParser(**arguments)


C = "<confidence> 0.83 </confidence>"


@pytest.mark.parametrize(
    ("position", "text", "confidences", "answer", "valid_in_training"),
    [
        ("first", f"{C}\nT\n</think>\n\nA", (0.83,), "\n\nA", True),
        ("first", f" <think>\n{C}\nT</think>A", (0.83,), "A", True),
        ("first", f"{C}<think>T</think>A", (0.83,), "A", False),
        ("first", f"{C} Well.\n<think>T</think>A", (0.83,), "A", False),
        ("first", f"<think>{C} of <think> T</think>A", (0.83,), "A", True),
        ("first", f"{C}T</think>A <think>", (0.83,), "A <think>", True),
        ("first", f"{C} T", (0.83,), "", True),
        ("first", f"{C} A", (0.83,), "", True),
        ("first", f"<think>T {C}</think>A", (None,), "A", False),
        ("first", f"T</think>{C}A", (None,), f"{C}A", False),
        ("first", f"<think><think>{C}</think>A", (None,), "A", False),
        ("last", f"<think>T {C}</think>A {C}", (0.83,), "A ", True),
        ("last", f"T {C}</think>A", (None,), "A", False),
        ("last", f"T {C}", (None,), "", False),
        ("both", f"<think>{C}T</think>A {C}", (0.83, 0.83), "A ", True),
        ("both", f"{C}T {C}", (0.83, None), "", True),
    ],
)
def test_thinking(position, text, confidences, answer, valid_in_training):
    for in_training in (False, True):
        parsed = ResponseParser(position, thinking=True, in_training=in_training)(text)
        assert parsed.answer == answer
        found = (parsed.confidence, parsed.confidence_after)[: len(confidences)]
        assert found == (confidences if valid_in_training or not in_training else (None,))


@given(st.text(alphabet="<confide/c>think 01.5\nx", max_size=60), st.sampled_from(["first", "last", "both"]))
def test_without_thinking_thoughts_are_text(text, position):
    assert ResponseParser(position, in_training=True)(text) == ResponseParser(position)(text)
    assert ResponseParser(position, thinking=True)(f"{text}<think>").answer in text.partition("</think>")[2] + "<think>"


def test_prompts_with_thinking_name_the_place_of_the_thought():
    from coca_mindspeed.algorithm.methods import METHODS, method_settings

    last_lines = {
        "coca": "<think> <confidence> confidence level here </confidence> thoughts here </think> answer here",
        "rlcr": "<think> thoughts here </think> answer here <confidence> confidence level here </confidence>",
        "caliber": "<think> <confidence> confidence level here </confidence> thoughts here </think> answer here "
        "<confidence> confidence level here </confidence>",
    }
    for name, line in last_lines.items():
        plain, thinking = (method_settings(name, thinking=each).system_prompt for each in (False, True))
        assert plain == METHODS[name].system_prompt
        assert thinking.splitlines() == [*plain.splitlines()[:-1], line]
