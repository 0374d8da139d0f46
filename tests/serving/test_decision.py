"""One pure function: a table of cases, and what holds for every policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.serving.decision import (
    AnswerGate,
    Band,
    Budget,
    CostRule,
    ThresholdRule,
    decide,
    decide_after,
)

BANDS = ThresholdRule([Band(0.8, "answer"), Band(0.5, "sample", 5), Band(0.3, "hook"), Band(0.0, "escalate")])
RICH = Budget(escalations=1, samples=8, hooks=1, tokens=100)


@pytest.mark.parametrize(
    ("confidence", "rule", "budget", "action", "samples"),
    [
        (1.0, BANDS, RICH, "answer", 0),
        (0.8, BANDS, RICH, "answer", 0),
        (0.79, BANDS, RICH, "sample", 5),
        (0.5, BANDS, RICH, "sample", 5),
        (0.49, BANDS, RICH, "hook", 0),
        (0.0, BANDS, RICH, "escalate", 0),
        (None, BANDS, RICH, "escalate", 0),
        (None, ThresholdRule([Band(0, "answer")], invalid="refuse"), RICH, "refuse", 0),
        # The caps.
        (0.6, BANDS, Budget(1, samples=3), "sample", 3),
        (0.6, BANDS, Budget(1, samples=1), "answer", 0),
        (0.4, BANDS, Budget(1, hooks=0, exhausted="refuse"), "refuse", 0),
        (0.1, BANDS, Budget(0), "answer", 0),
        (0.1, BANDS, Budget(0, exhausted="refuse"), "refuse", 0),
        (None, BANDS, Budget(0, exhausted="refuse"), "refuse", 0),
        (1.0, BANDS, Budget(1, tokens=0), "refuse", 0),
        # answer 1 + 10 (1 - s), escalate 4, refuse 6: the answer up to s = 0.7.
        (0.71, CostRule(1, 10, 6, 4), RICH, "answer", 0),
        (0.7, CostRule(1, 10, 6, 4), RICH, "answer", 0),
        (0.69, CostRule(1, 10, 6, 4), RICH, "escalate", 0),
        (0.69, CostRule(1, 10, 3, 4), RICH, "refuse", 0),
        (None, CostRule(1, 10, 3, 4, invalid="refuse"), RICH, "refuse", 0),
    ],
)
def test_table(confidence, rule, budget, action, samples):
    decision = decide(confidence, rule, budget)
    assert (decision.action, decision.samples) == (action, samples)
    assert decision.reason


_ACTIONS = st.sampled_from(["answer", "refuse", "escalate", "sample", "hook"])
_CONFIDENCES = st.floats(0, 1)


@st.composite
def threshold_rules(draw):
    above = sorted(draw(st.sets(st.floats(0.01, 1), max_size=4)), reverse=True)
    bands = []
    for at_least in [*above, 0.0]:
        action = draw(_ACTIONS)
        bands.append(Band(at_least, action, draw(st.integers(2, 9)) if action == "sample" else 0))
    return ThresholdRule(bands, draw(_ACTIONS.filter(lambda action: action != "sample")))


budgets = st.builds(
    Budget,
    escalations=st.integers(0, 2),
    samples=st.integers(0, 9),
    hooks=st.integers(0, 1),
    tokens=st.one_of(st.none(), st.integers(0, 3)),
    exhausted=st.sampled_from(["answer", "refuse"]),
)
cost_rules = st.builds(CostRule, *[st.floats(0, 10)] * 4)


@given(threshold_rules(), _CONFIDENCES, _CONFIDENCES)
def test_a_higher_confidence_is_never_in_a_lower_band(rule, one, other):
    plenty = Budget(escalations=9, samples=99, hooks=9)
    low, high = sorted((one, other))
    places = []
    for confidence in (low, high):
        chosen = next(i for i, band in enumerate(rule.bands) if confidence >= band.at_least)
        decision = decide(confidence, rule, plenty)
        assert (decision.action, decision.samples) == (rule.bands[chosen].action, rule.bands[chosen].samples)
        places.append(chosen)
    assert places[1] <= places[0]


@given(cost_rules, _CONFIDENCES, _CONFIDENCES, budgets)
def test_what_is_answered_is_answered_with_more_confidence_too(rule, one, other, budget):
    low, high = sorted((one, other))
    if budget.exhausted == "refuse" or budget.escalations:
        wanted = [decide(s, rule, budget).action for s in (low, high)]
        assert wanted[0] != "answer" or wanted[1] == "answer"


@given(st.one_of(threshold_rules(), cost_rules), st.one_of(st.none(), _CONFIDENCES), budgets)
def test_caps_are_respected(rule, confidence, budget):
    decision = decide(confidence, rule, budget)
    assert decision.action != "escalate" or budget.escalations > 0
    assert decision.action != "hook" or budget.hooks > 0
    assert decision.action != "sample" or 2 <= decision.samples <= budget.samples
    assert budget.tokens != 0 or decision.action == "refuse"


@pytest.mark.parametrize("bands", [[], [Band(0.5, "answer")], [Band(0.5, "answer"), Band(0.5, "refuse")],
                                   [Band(1.5, "answer"), Band(0, "refuse")], [Band(0, "sample")],
                                   [Band(0, "answer", 3)]])  # fmt: skip
def test_bands_that_leave_a_confidence_out_or_mean_nothing_are_refused(bands):
    with pytest.raises(ValueError, match="band"):
        ThresholdRule(bands)


def test_what_is_no_confidence_is_refused():
    for wrong in (1.01, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            decide(wrong, BANDS, RICH)


@pytest.mark.parametrize(
    ("gate", "cut_off", "log_prob", "escalations", "action"),
    [
        (AnswerGate(-1.0), False, -0.5, 1, "answer"),
        (AnswerGate(-1.0), False, -1.5, 1, "escalate"),
        (AnswerGate(-1.0), False, None, 1, "escalate"),
        (AnswerGate(-1.0, otherwise="refuse"), False, -1.5, 1, "refuse"),
        (AnswerGate(-1.0), False, -1.5, 0, "answer"),
        (AnswerGate(cut_off=False), True, None, 1, "escalate"),
        (AnswerGate(cut_off=False), False, None, 1, "answer"),
        (AnswerGate(), True, None, 1, "answer"),
    ],
)
def test_second_gate(gate, cut_off, log_prob, escalations, action):
    decision = decide_after(gate, Budget(escalations), cut_off=cut_off, mean_log_prob=log_prob)
    assert decision.action == action


def test_spending():
    left = RICH.spend(tokens=30, escalations=1, samples=2, hooks=1)
    assert (left.tokens, left.escalations, left.samples, left.hooks) == (70, 0, 6, 0)
    assert left.spend(tokens=100).tokens == 0
    assert Budget(1).spend(tokens=10**9).tokens is None
