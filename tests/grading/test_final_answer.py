"""Finding the final answer in a response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.grading.math.extract import final_answer, last_boxed, without_boxes
from coca_mindspeed.grading.math.normalise import plain_characters
from tests.grading.tables import text_cases
from tests.processor import within
from tests.tables import check_rows

FUNCTIONS = {f.__name__: f for f in (final_answer, last_boxed, plain_characters, without_boxes)}


def test_the_table_of_texts():
    def check(function, text, expected):
        assert FUNCTIONS[function](text) == expected

    check_rows(check, text_cases(*FUNCTIONS))


def test_a_number_far_from_the_end_is_no_final_answer():
    assert final_answer("The answer is 5. " + "and then words follow " * 200) is None


@given(st.text(alphabet=r"\{}boxed$.1 ", max_size=300))
def test_finding_never_raises_and_gives_a_part_of_the_text(text):
    boxed = last_boxed(text)
    assert boxed is None or boxed in text
    final_answer(text)


HOSTILE = [r"\boxed{", "{", "$", "answer is ", "1,", r"\(", r"\[", "answer", " ", r"\boxed{1}", "answer is 5 "]
HOSTILE += ["5 and ", "$5 ", "x = 5, ", "#### ", "5\n", "A: 1\n", "( 5 ", r"\frac{", "5 if ", "not 5. ", "<answer>"]
HOSTILE += ["answer is not 5. ", "The answer a ", "because 5 ", "**", "5 (", r"\begin{a}", "$x$ "]


@pytest.mark.timing
def test_time_is_linear_in_the_response():
    def check(piece):
        text = piece * (300_000 // len(piece))
        started = time.process_time()
        final_answer(text)
        assert within(time.process_time() - started, 0.6)

    check_rows(check, [(piece,) for piece in HOSTILE])
