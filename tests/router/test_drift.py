"""The alarm rings when labels contradict the calibration, and seldom otherwise."""

import numpy as np

from coca_router.metrics import DriftAlarm


def labels_until(alarm, rng, truth, most, name):
    for count in range(1, most + 1):
        s = float(rng.uniform(0.5, 1))
        alarm.label(s, bool(rng.random() < truth(s)), answered=True)
        if alarm.watches[name].alarm:
            return count
    return most + 1


def test_no_alarm_without_a_change():
    """Runs of 200 labels: with a mean run length of 2,000 or more, at most about one in ten rings."""
    rung = 0
    for seed in range(200):
        alarm, rng = DriftAlarm(2000, error=0.25), np.random.default_rng(seed)
        labels_until(alarm, rng, lambda s: s, 200, "risk")
        rung += bool(alarm.alarms())
    assert rung <= 0.1 * 3 * 200  # three watches


def test_an_alarm_soon_after_a_change():
    for name, truth, error in (
        ("overconfident", lambda s: s - 0.3, None),
        ("underconfident", lambda s: min(1.0, s + 0.3), None),
        ("risk", lambda s: 0.6, 0.1),
    ):
        waits = []
        for seed in range(20):
            alarm, rng = DriftAlarm(2000, error=error), np.random.default_rng(seed)
            if name != "risk":
                labels_until(alarm, rng, lambda s: s, 150, name)  # a good past does not delay it
            waits.append(labels_until(alarm, rng, truth, 400, name))
        assert np.median(waits) < 150, name


def test_only_answers_given_by_their_confidence_move_the_risk_watch():
    alarm = DriftAlarm(100, error=0.1)
    for _ in range(100):
        alarm.label(None, False, answered=False)
    assert alarm.alarms() == []
    for _ in range(10):
        alarm.label(None, False, answered=True)
    assert alarm.alarms() == ["risk"]
