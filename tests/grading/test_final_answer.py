"""Finding the final answer in a response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.grading.mathematics.final_answer import final_answer, last_boxed, plain_characters, without_boxes
from tests.processor import allowed


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"stray } and { but \boxed{3}", "3"),
        (r"\\boxed{4}", None),
        ("no box", None),
        (r"\boxed{5", None),
    ],
)
def test_last_boxed(response: str, expected: str | None) -> None:
    assert last_boxed(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"The answer is 3, so \boxed{4}.", "4"),
        ("The answer is 3.", "3"),
        ("The answer is **3.5**.", "3.5"),
        ("Final answer: $x+1$. Done.", "x+1"),
        ("the answer is: 1/2\nThank you for the 7 questions", "1/2"),
        ("Answer: 4\nAnswer: 5", "5"),
        (r"We get \(x=2\) and so \[y=3\]", "y=3"),
        ("so 3 apples and then 1,234", "1,234"),
        ("it costs 15%", "15%"),
        ("it is 1e-3", "1e-3"),
        (r"\boxed{}", None),
        (r"\boxed{42", None),
        (r"The answer is 42. So $\boxed{42$", None),
        (r"\boxed{42} or rather \boxed{43", "42"),
        (r"\\boxed{42", "42"),
        ("nothing here", None),
        ("", None),
    ],
)
def test_fallbacks_in_their_order(response: str, expected: str | None) -> None:
    assert final_answer(response) == expected


def test_a_number_far_from_the_end_is_no_final_answer() -> None:
    assert final_answer("The answer is 5. " + "and then words follow " * 200) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x²", "x^{2}"),
        ("x₁₂", "x_{12}"),
        ("2½", r"2\frac{1}{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("１２．５％", "12.5%"),
        ("1\u200b2\ufeff", "12"),
        ("−5", "-5"),
        ("plain", "plain"),
    ],
)
def test_plain_characters(text: str, expected: str) -> None:
    assert plain_characters(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", "5"),
        (r"\boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{1 \fbox{2} \boxed{3}} 4", "3"),
        (r"\boxed{\boxed{1} 2} \boxed{\boxed{3} 4}", "3"),
        (r"\boxed{5", r"\boxed{5"),
    ],
)
def test_without_boxes(text: str, expected: str) -> None:
    assert without_boxes(text) == expected


@given(st.text(alphabet=r"\{}boxed$.1 ", max_size=300))
def test_finding_never_raises_and_gives_a_part_of_the_text(text: str) -> None:
    boxed = last_boxed(text)
    assert boxed is None or boxed in text
    final_answer(text)


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "$", "answer is ", "1,", r"\(", r"\[", "answer", " ", r"\boxed{1}"])
def test_time_is_linear_in_the_response(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    final_answer(text)
    assert time.process_time() - started < allowed(2.0)
