"""Math grading: the table of settled pairs, and what must hold for any answers."""

import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.grading.workers import Failure, TaskResult, Workers
from tests.grading.tables import read_table
from tests.processor import within

PAIRS = read_table("math_pairs.tsv")


def record(gold, number=0):
    return Record(id=str(number), dataset="test", category="math", question="?", answer=gold)


def grader_with(seconds):
    @pytest.fixture(scope="module")
    def grader():
        with closing(MathGrader(seconds=seconds, workers=2)) as grader:
            yield grader

    return grader


# The patient one's limit is far above what any pair but a bomb needs, on a machine that is busy with other work too.
grader, patient_grader, impatient_grader = map(grader_with, (5.0, 60.0, 1.0))


def outcomes(grader, pairs):
    records = [record(gold, number) for number, (gold, _) in enumerate(pairs)]
    return [v.outcome.value for v in grader.grade(records, [rf"So it is $\boxed{{{a}}}$." for _, a in pairs])]


def test_the_table_of_pairs(patient_grader, impatient_grader):
    assert len(PAIRS) >= 500
    assert len({pair[:2] for pair in PAIRS}) == len(PAIRS)
    bombs = [pair for pair in PAIRS if "bomb" in pair[3]]
    assert bombs
    others = [pair for pair in PAIRS if pair not in bombs]
    different = [
        (*pair, was)
        for grader, pairs in ((patient_grader, others), (impatient_grader, bombs))
        for pair, was in zip(pairs, outcomes(grader, [pair[:2] for pair in pairs]), strict=True)
        if pair[2] != was
    ]
    assert different == []


@pytest.mark.parametrize(
    ("gold", "answer", "computed", "written"),
    [
        ("5", "10-3-2", "right", "wrong"),
        ("10-3", "7", "right", "wrong"),
        ("3-1", "2-0", "right", "wrong"),
        (r"40-20\%", r"20\%", "right", "wrong"),
        ("10-3", "10-3", "right", "right"),
        ("10-3", "6", "wrong", "wrong"),
    ],
)
def test_arithmetic_of_a_record_is_computed(grader, gold, answer, computed, written):
    records = [Record("1", "test", "math", "?", gold, metadata=extra) for extra in ({"arithmetic": True}, {})]
    verdicts = grader.grade(records, [rf"\boxed{{{answer}}}"] * 2)
    assert [verdict.outcome.value for verdict in verdicts] == [computed, written]


def test_verdicts_do_not_depend_on_order_batches_or_the_number_of_workers(patient_grader):
    # Time limits depend on the machine's load, so the bombs are left out here.
    grader = patient_grader
    pairs = [pair[:2] for pair in PAIRS if pair[2] != "ungradable" and "bomb" not in pair[3]][::27]
    expected = outcomes(grader, pairs)
    assert outcomes(grader, pairs[::-1])[::-1] == expected
    assert [outcomes(grader, [pair])[0] for pair in pairs] == expected
    with closing(MathGrader(seconds=60.0, workers=1)) as alone:
        assert outcomes(alone, pairs) == expected


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["12", r"\frac{1}{2}", "x+1", r"\text{yes}", "(1,2)", "50\\%"]))
def test_no_text_raises_or_is_right_by_accident(grader, answer, gold):
    verdict = grader.grade([record(gold)], [answer])[0]
    if verdict.correct:  # then it says so: something of the gold answer stands in it
        assert any(character.isalnum() for character in answer)
    assert verdict.outcome is not Outcome.UNGRADABLE


BOMBS = [
    "9^{9^{9^9}}",
    r"\boxed{" * 20_000,
    "{" * 50_000 + "}" * 50_000,
    r"\boxed{" + "{" * 900 + "1" + "}" * 900 + "}",
    r"\boxed{" + "(" * 990 + "1" + ")" * 990 + "}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{1e999999999}",
    r"\boxed{10^{999999999}}",
    r"\boxed{" + "9!" * 50 + "}",
    r"\boxed{99999999!}",
    r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^{k}}}",
    r"\boxed{" + "x" * 1_900 + "!}",
    r"\boxed{" + "1 " * 950 + "}",
    r"\boxed{" + r"\text{a} " * 200 + "!}",
    "$" * 100_000,
    "answer is " * 10_000,
    "1," * 50_000,
    "\u0000\ud800\uffff",
    r"\boxed{__import__('os').system('touch /tmp/grading_was_here')}",
    r"\boxed{\text{__import__('os').system('touch /tmp/grading_was_here')}}",
]


def test_a_bomb_is_not_right_and_costs_no_more_than_its_limit(impatient_grader):
    records = [record("7", number) for number in range(len(BOMBS))]
    *verdicts, last = impatient_grader.grade([*records, record("x+1")], [*BOMBS, r"\boxed{1+x}"])
    assert {verdict.outcome for verdict in verdicts} == {Outcome.WRONG}
    assert max(verdict.seconds for verdict in verdicts) <= 5.0  # wall time, of a limit on processor time of 1 s
    assert last.correct
    assert not Path("/tmp/grading_was_here").exists()


def test_metrics_count_outcomes_and_distinct_answers_are_compared_once(impatient_grader):
    before = impatient_grader.metrics()
    impatient_grader.grade([record("7")] * 19, [r"\boxed{7}", r"\boxed{8}", "", *[r"\boxed{99999999!}"] * 16])
    metrics = {name: value - before[name] for name, value in impatient_grader.metrics().items()}
    expected = {"right": 1, "wrong": 18, "ungradable": 0, "timeouts": 1, "restarts": 1}
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["seconds"] >= 1.0


def test_gold_answers_that_cannot_be_used_are_named(grader):
    golds = ["7", r"\frac{1}{2}", "x^2+1", r"\text{Tuesday}", "(C)"]
    bad = ["", r"2n+1, n\in\mathbb{Z}", r"\frac{1", "9" * 3_000]
    assert [bool(problem) for problem in grader.gold_problems(golds + bad)] == [False] * 5 + [True] * 4
    for gold in ("", "  "):
        with pytest.raises(DataError, match="it is empty"):
            grader.grade([record(gold)], ["7"])


def test_boxed_only_takes_no_other_answer():
    with closing(MathGrader(workers=1, boxed_only=True)) as grader:
        verdicts = grader.grade([record("7")] * 3, ["The answer is 7.", "7", r"\boxed{7}"])
    assert [verdict.correct for verdict in verdicts] == [False, False, True]


def test_equivalence_does_not_depend_on_the_order_of_the_pair(grader):
    finals = grader.final_answers(
        [r"\boxed{\frac{1}{2}}", "The answer is 0.5.", r"\boxed{x<2}", r"\boxed{(-\infty,2)}", "?"]
    )
    assert finals[4] is None
    half, decimal, condition, interval = (final or "" for final in finals[:4])
    pairs = [(half, decimal), (decimal, half), (condition, interval), (interval, condition), (half, condition)]
    assert grader.equivalent(pairs) == [True, True, True, True, False]


HOSTILE = {
    "slashes": lambda n: f"{n}" + "a/" * 990,
    "words": lambda n: f"{n}" + " ab" * 660,
    "braces": lambda n: f"{n}" + "{" * 950 + "}" * 950,
    "boxes": lambda n: rf"\boxed{{{n}" * 200 + "}" * 200,
    "commas": lambda n: f"{n}," + "1," * 950,
    "equalities": lambda n: f"{n}=" + "x=" * 950,
    "digits": lambda n: f"{n}" + "9" * 1900,
    "digits in groups": lambda n: f"{n}" + ",999" * 480,
    "texts": lambda n: f"{n}" + r"\text{a}" * 230,
    "spaces": lambda n: f"{n}" + r"\ \, " * 300,
    "row breaks": lambda n: f"{n}" + "\\\\ " * 600,
    "colons": lambda n: f"{n}" + ":1" * 950,
    "backslashes": lambda n: f"{n}" + "\\" * 1900,
    "scales": lambda n: f"{n}" + " million" * 230,
    "degrees": lambda n: f"{n}" + r"^\circ " * 280,
    "units": lambda n: f"{n} " + "m/s " * 400,
    "Chinese units": lambda n: f"{n}" + "元" * 1900,
    "fractions": lambda n: f"{n}" + r"\frac" * 390,
    "roots": lambda n: f"{n}" + "sqrt(" * 390,
    "intervals": lambda n: f"]{n},2[" + r"\cup]1,2[" * 180,
}


@pytest.mark.timing
def test_a_step_of_hostile_answers_is_graded_in_seconds(impatient_grader):
    kinds = list(HOSTILE.values())
    answers = [rf"\boxed{{{kinds[n % len(kinds)](n)}}}" for n in range(1_024)]
    timeouts = impatient_grader.metrics()["timeouts"]
    started = time.process_time()
    verdicts = impatient_grader.grade([record("7")] * 1_024, answers)
    assert within(time.process_time() - started, 3.0)
    assert not any(verdict.correct for verdict in verdicts)
    assert impatient_grader.metrics()["timeouts"] - timeouts < 5  # a worker sees nearly none of them


DEEP = ["(" * 500 + "1" + ")" * 500, "{" * 500 + "1" + "}" * 500, r"\sqrt{" * 200 + "2" + "}" * 200, "9" * 5_000]


@pytest.mark.parametrize("text", DEEP, ids=["parentheses", "braces", "roots", "digits"])
def test_too_deep_or_long_is_a_wrong_answer_and_a_gold_error(impatient_grader, text):
    answers = [rf"\boxed{{{text}}}", text, f"The answer is {text}.", rf"\boxed{{{text} million}}"]
    verdicts = impatient_grader.grade([record("7"), record("x+1"), record("A"), record(r"\text{one}")], answers)
    assert {verdicts[0].outcome, verdicts[3].outcome} == {Outcome.WRONG}
    assert not any(verdict.correct for verdict in verdicts)
    assert impatient_grader.equivalent([(text, text), (text, "7")]) == [False, False]
    assert impatient_grader.gold_problems([text])[0]
    with pytest.raises(DataError, match=r"'1' of 'test': "):
        impatient_grader.grade([record("7"), record(text, 1)], ["7", "7"])


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("gold_fails", [False, True])
def test_a_comparison_that_fails(monkeypatch, failure, gold_fails):
    """Of the machine's own failures, none is an answer's."""
    grader = MathGrader(workers=1)

    def compared(_self, _compare, pairs):
        for gold, answer, *_ in pairs:
            failed = answer != gold or gold_fails
            yield TaskResult(None, failure) if failed else TaskResult((Outcome.RIGHT, ""))

    monkeypatch.setattr(Workers, "map", compared)
    own = failure in (Failure.TIMEOUT, Failure.DIED, Failure.RAISED)
    expected = Outcome.WRONG if own and not gold_fails else Outcome.UNGRADABLE
    assert grader.grade([record(r"\sqrt{2}x")], [r"\boxed{\sqrt{3}x}"])[0].outcome is expected
    grader.close()
