"""Answers that restate the question or leave the work undone earn nothing in training."""

from collections.abc import Iterator

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.math.restated import EvaluatedOnly, left_undone
from coca_mindspeed.grading.verdict import Outcome, Tally, Verdict

# Question, gold answer, answer: each answer has the gold one's value.
UNDONE = [
    ("Compute $17*23$.", "391", "17*23"),
    ("Compute $17*23$.", "391", "23*17"),
    ("Compute $17*23$.", "391", r"391 = 17\cdot 23"),
    ("Compute $17*23$.", "391", "400-9"),
    (r"Find $\frac12+\frac13$.", r"\frac56", "1/2+1/3"),
    ("Compute $2^{10}$", "1024", "2^{10}"),
    (r"Compute $\binom{10}{3}$", "120", r"\binom{10}{3}"),
    (r"Simplify $\sqrt{18}$", r"3\sqrt{2}", r"\sqrt{18}"),
    (r"Find $\sum_{k=1}^{100} k$", "5050", r"\sum_{k=1}^{100} k"),
    ("q", "12", r"\gcd(12,24)"),
    ("q", r"\frac12", r"\int_0^1 x dx"),
    ("q", "1", r"\lim_{x\to0}\frac{\sin x}{x}"),
    ("Expand $(x+1)^2$", "x^2+2x+1", "(x+1)^2"),
    ("Expand $(x+1)^2$", "x^2+2x+1", "(1+x)^2"),
    ("q", "(1,2)", "(2-1,4/2)"),
    ("q", "5", "2+3"),
    (r"Simplify $\frac{6}{8}$", r"\frac34", r"\frac{6}{8}"),
    ("Simplify 6/8.", r"\frac34", "6/8"),
    (r"What is 50\% as a decimal", "0.5", r"50\%"),
    ("What is 7 mod 4", "3", r"7 \bmod 4"),
    ("Compute $5!!$", "15", "5!!"),
    ("Compute $pi/6 + pi/3$", r"\frac{\pi}{2}", r"\frac\pi6+\frac\pi3"),
    ("Find $sin(1)$ to six places", "0.841471", r"\operatorname{sin}(1)"),
    (r"Compute $\sqrt{4}$", "2", r"\sqrt{16}/2"),
    (r"Compute $\sin 60^\circ$", r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"),
    ("q", "7", r"\max(3,7)"),
    ("Evaluate the product $(3)(4)$", "12", "(3)(4)"),
    ("q", "5", "-(-5)"),
    ("q", "5050", r"\frac{100\cdot 101}{2}"),
    ("391 apples among 17 children: how many for each?", "23", "391/17"),
    ("391 apples among 17 children: how many for each?", "23", r"\frac{391}{17}"),
    ("391 apples among 17 children: how many for each?", "23", r"x = \frac{391}{17}"),
    ("391 apples among 17 children: how many for each?", "23", "(391/17)"),
    ("How much is a half less than minus two?", "-2.5", "-3+1/2"),
    ("How much is a half less than minus two?", r"-\frac{5}{2}", "-3+1/2"),
    ("391 m in 782 s: how fast, in m/s?", "0.5", "391/782"),
    ("How many halves in 2.5?", "5", r"\frac{2.5}{0.5}"),
    ("How much is a tenth of 120, and a half more?", "18", r"15% \cdot 120"),
    ("How much is a tenth of 120, and a half more?", "18", r"15\% * 120"),
    ("x", "3,23", "3, 391/17"),
]
DONE = [
    ("Compute $17*23$.", "391", "391"),
    ("Compute $17*23$.", "391", r"17\cdot 23 = 391"),
    ("What is 7 mod 4", "3", r"3\pmod{4}"),
    ("How many m^2", "20", r"20\ \mathrm{m^2}"),
    (r"Find $\frac12+\frac13$.", r"\frac56", r"\frac{5}{6}"),
    ("", r"\frac56", "10/12"),
    ("How many subsets?", "1024", "2^{10}"),
    ("x", "2^{10}", "2^{10}"),
    ("Compute $2^{10}$", "2^{10}", "2^{10}"),
    ("c", r"\binom{10}{3}", r"\binom{10}{3}"),
    ("How many ways", "120", r"\binom{10}{3}"),
    (r"Simplify $\sqrt{18}$", r"3\sqrt{2}", r"3\sqrt{2}"),
    ("q", r"\sum_{k=1}^n k^2", r"\sum_{i=1}^n i^2"),
    ("Expand $(x+1)^2$", "x^2+2x+1", "1+2x+x^2"),
    ("Solve $x^2=4$", "-2,2", r"x=2 \text{ or } x=-2"),
    ("q", r"(1,\frac12)", "(1,0.5)"),
    ("q", "5", "x=5"),
    ("q", "5", "2+3=5"),
    ("There are 5 cats and 7 dogs.", "5", "5"),
    ("He paid 5.0 for it", "5", "5.0"),
    ("A has 1/2 left", r"\frac{1}{2}", "1/2"),
    ("q", r"3\times 10^8", r"3\cdot 10^{8}"),
    ("q", "300000000", r"3\cdot 10^{8}"),
    ("A number", "-3", "-3"),
    ("q", r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("q", "1234", "1,234"),
    ("q", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("q", "[1,2]", r"1 \le x \le 2"),
    ("q", r"5\text{ cm}", "5 cm"),
    ("q", "2", r"\sqrt{4}"),
    ("Is $x+1$ bigger", "x+1", "1+x"),
    ("q", r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"),
    ("q", r"\frac{1}{3}", "0.333333"),
    ("q", r"\text{Yes}", "Yes"),
    ("q", "C", "(C) 3+4"),
    ("probability 3/4 of", r"\frac{3}{4}", "0.75"),
    ("q", r"1\frac12", r"\frac32"),
    ("q", "1.5", r"1\frac12"),
    ("q", "3:4", "3:4"),
    ("q", "2.5", "5/2"),
    ("q", "2.5", "2 1/2"),
    ("q", r"\frac{23}{4}", r"\frac{46}{8}"),
    ("q", "1101_2", "1101_{2}"),
]


@pytest.mark.parametrize(("question", "gold", "answer"), UNDONE)
def test_what_leaves_the_work_undone(question: str, gold: str, answer: str) -> None:
    assert left_undone(question, gold, rf"So \boxed{{{answer}}}.")


@pytest.mark.parametrize(("question", "gold", "answer"), DONE)
def test_what_is_an_answer(question: str, gold: str, answer: str) -> None:
    assert left_undone(question, gold, rf"So \boxed{{{answer}}}.") == ""


@pytest.mark.parametrize("gold", sorted({gold for _, gold, _ in UNDONE + DONE}))
def test_the_gold_answer_itself_is_always_an_answer(gold: str) -> None:
    assert left_undone(f"Find ${gold}$.", gold, rf"\boxed{{{gold}}}") == ""


class AlwaysRight:
    def __init__(self) -> None:
        self.closed = False
        self.tally = Tally()

    def grade(self, records: list[Record], answers: list[str]) -> list[Verdict]:
        return [Verdict(Outcome.RIGHT)] * len(records)

    def close(self) -> None:
        self.closed = True


def record(question: str, gold: str, category: str = "math", **metadata: object) -> Record:
    return Record("r1", "mine", category, question, gold, metadata=metadata)


def test_only_mathematics_is_looked_at() -> None:
    inner = AlwaysRight()
    grader = EvaluatedOnly(inner)  # type: ignore[arg-type]
    records = [
        record("17*23", "391"),
        record("17*23", "391", grader="factual"),
        record("17*23", "391", category="code"),
        record("17*23", "391", category="other", grader="math"),
    ]
    verdicts = grader.grade(records, [r"\boxed{17*23}"] * 4)
    assert [verdict.correct for verdict in verdicts] == [False, True, True, False]
    assert "arithmetic" in verdicts[0].reason
    assert grader.unevaluated == 2
    grader.close()
    assert inner.closed


@pytest.fixture(scope="module")
def by_value() -> Iterator[MathGrader]:
    grader = MathGrader(workers=1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("question", "gold", "answer"),
    [
        (r"Compute $\sum_{k=1}^{100} k$.", "5050", r"\sum_{k=1}^{100} k"),
        (r"Compute $\gcd(12,18)$.", "6", r"\gcd(12,18)"),
        (r"Compute $\int_0^1 x\,dx$.", r"\frac12", r"\int_0^1 x\,dx"),
        (r"Compute $\lim_{x\to 0}\frac{\sin x}{x}$.", "1", r"\lim_{x\to 0}\frac{\sin x}{x}"),
        ("Compute $17*23$.", "391", "17*23"),
    ],
)
def test_by_value_a_restated_question_is_right_and_in_training_it_is_not(
    by_value: MathGrader, question: str, gold: str, answer: str
) -> None:
    records, answers = [record(question, gold)] * 2, [rf"\boxed{{{answer}}}", rf"\boxed{{{gold}}}"]
    assert [v.correct for v in by_value.grade(records, answers)] == [True, True]
    assert [v.correct for v in EvaluatedOnly(by_value).grade(records, answers)] == [False, True]
