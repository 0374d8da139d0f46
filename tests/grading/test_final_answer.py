"""Finding the final answer in a response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.grading.math.final_answer import final_answer, last_boxed, plain_characters, without_boxes
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
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{1} then \boxed{1", "1"),
        (r"\boxed{12} then \boxed{", "12"),
        (r"\boxed{\frac{1}{2}} then \boxed{\frac{1", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2 and \boxed{3}", "3"),
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
        ("**Answer**: 5", "5"),
        ("The answer is $5$, not $6$.", "5"),
        ("The answer is $5$ and this is because $2+3=5$.", "5"),
        ("The answer is $5$ or $6$.", "$5$ or $6$"),
        (r"The answer is \(5\), or maybe \(7\).", None),
        ("The answer is $5$, not sure, could be $6$.", None),
        ("The answer is $5$ is wrong.", None),
        ("It is 7 and not $6$.", "7"),
        ("The answer is $5$, $6$.", "$5$, $6$"),
        ("The answer is $$\n5\n$$\nand $x$ is positive", "5"),
        ("The answer is \\[\n5\n\\]\nand \\(x=2\\) was used.", "5"),
        ("The answer is $5$, and $x$ is positive.", "5"),
        ("The answer is $5$, $x=3$ is extraneous.", "5"),
        ("The answer is $5$, 100% sure.", "5"),
        ("The answer is $42$, $42 = 6*7$.", "42"),
        (r"We get \(x=2\) and so \[y=3\]", "y=3"),
        ("so 3 apples and then 1,234", "1,234"),
        ("it costs 15%", "15%"),
        ("it is 1e-3", "1e-3"),
        (r"\boxed{}", None),
        (r"\boxed{42", None),
        (r"The answer is 42. So $\boxed{42$", None),
        (r"\boxed{42} or rather \boxed{43", None),
        (r"\\boxed{42", "42"),
        ("nothing here", None),
        ("", None),
    ],
)
def test_fallbacks_in_their_order(response: str, expected: str | None) -> None:
    assert final_answer(response) == expected


@pytest.mark.parametrize(
    "response",
    [
        *("It is not 6.", "It isn't 6.", "It cannot be 6", "It can't possibly be 6", "not equal to 6", "never 6"),
        *(
            "It's anything but 6.",
            "6 is wrong",
            "6 is not it",
            "6 isn't right",
            "$6$ cannot be",
        ),
        *(
            "less than 6",
            "more than 6",
            "greater than or equal to 6",
            "at least 6",
            "at most $6$",
            "6 or more",
            "above 6",
        ),
        *("> 6", "x < 6", "x <= 6", r"x \neq 6", r"x \le 6", "x ≠ 6", "x ≥ 6", "± 6", "x != 6", "rather than 6"),
        *(
            "5 or 6",
            "either 5 or 6",
            "5 or perhaps 6",
            "between 5 and 6",
            "5 to 6",
            "$5$ or $6$",
            "5 and **6**",
            "5 vs 6",
        ),
        *("It's neither 5 nor 6", r"\(5\) to \(6\)", "everything except 6", "not\n6"),
    ],
)
def test_what_is_denied_or_a_bound_or_one_of_several_is_no_answer(response: str) -> None:
    assert final_answer(response) is None


@pytest.mark.parametrize(
    "response",
    [
        *("It is 6", "6", "= 6", "x = 6", "so 6", "about 6", "It's not hard: 6", "This is not hard so we get 6"),
        *(
            "It is not divisible by 3, hence 6",
            "We do not know x but 2 and 4 make 6",
            "3 more than 3 is 6",
            "5 + 1 = 6",
        ),
        *(
            "more than enough; 6 apples",
            "2 or 3 times 2 equals 6",
            "I know it. 6",
            "If x > 5 then it is 6",
            "6 is right",
        ),
        *("A note on knots: 6", "from 5, 6 follows", "Add 2 to 4 and get 6", "nothing but 6"),
        *("It is not 5. It is 6.", "x > 5, x < 7, x = 6", "6 or so", "I can 6", "6 does it", "is it not so? 6"),
        *("5 + 1 => 6", "5 + 1 -> 6", "5 + 1 = <<5+1=6>>6", r"5 + 1 \to 6", "--> 6"),
    ],
)
def test_other_words_around_an_answer_do_not_matter(response: str) -> None:
    assert final_answer(response) == "6"


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
