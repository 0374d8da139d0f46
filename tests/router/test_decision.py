"""The decision on a confidence: a table of cases, and properties of every policy."""

import pytest

from coca_router.decision import Band, Budget, ThresholdRule, answer_from, decide

BANDS = ThresholdRule([Band(0.8, "answer"), Band(0.3, "refuse"), Band(0.0, "escalate")])
RICH = Budget(escalations=1, tokens=100)


@pytest.mark.parametrize(
    ("confidence", "rule", "budget", "action", "exhausted"),
    [
        (1.0, BANDS, RICH, "answer", False),
        (0.8, BANDS, RICH, "answer", False),
        (0.79, BANDS, RICH, "refuse", False),
        (0.0, BANDS, RICH, "escalate", False),
        (None, BANDS, RICH, "escalate", False),
        (None, ThresholdRule([Band(0, "answer")], invalid="refuse"), RICH, "refuse", False),
        # The caps.
        (0.1, BANDS, Budget(0), "answer", True),
        (0.1, BANDS, Budget(0, exhausted="refuse"), "refuse", True),
        (None, BANDS, Budget(0, exhausted="refuse"), "refuse", True),
        (1.0, BANDS, Budget(1, tokens=0), "refuse", False),
        # A certified tier answers nothing below its threshold.
        (0.7, answer_from(0.7, strict=True), RICH, "answer", False),
        (0.69, answer_from(0.7, strict=True), RICH, "escalate", False),
        (0.69, answer_from(0.7, strict=True), Budget(0), "refuse", True),
        (0.69, answer_from(0.7, "refuse"), RICH, "refuse", False),
        (0.0, answer_from(0.0), RICH, "answer", False),
        (None, answer_from(0.0), RICH, "escalate", False),
    ],
)
def test_table(confidence, rule, budget, action, exhausted):
    decision = decide(confidence, rule, budget)
    assert (decision.action, decision.exhausted) == (action, exhausted)
    assert decision.reason


def test_the_reason_names_the_bound_and_bad_values_are_refused():
    for confidence, bound in ((0.85, "0.8"), (0.4, "0.3"), (0.03, "below 0.3")):
        assert bound in decide(confidence, BANDS, RICH).reason
    for wrong in (1.01, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            decide(wrong, BANDS, RICH)
    for bands in ([], [(0.5, "answer")], [(0.5, "answer"), (0.5, "refuse")], [(1.5, "answer"), (0, "refuse")]):
        with pytest.raises(ValueError, match="band"):
            ThresholdRule([Band(*band) for band in bands])
