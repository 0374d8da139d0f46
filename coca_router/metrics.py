"""Prometheus metrics of the proxy, and the alarm for a calibration that labels contradict.

The alarm is an e-CUSUM (Shin, Ramdas and Rinaldo, 2022): a capital is multiplied by ``1 + stake * (x - expected)`` for
each label, which has a mean of at most 1 while the calibration holds, and is reset to 1 where it falls below.
"""

import math
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coca_router.trace import Trace

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STAKES = (0.1, 0.25, 0.5, 0.9)


class ServingMetrics:
    """The metrics of one proxy; their labels hold names of the configuration and no text of a request."""

    def __init__(self) -> None:
        self.registry = new = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"coca_{name}", text, labels, registry=new)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"coca_{name}", text, labels, registry=new)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"coca_{name}", text, buckets=_SECONDS, registry=new)

        self.requests = counter("requests", "requests and their outcome", "tier", "action", "outcome")
        self.refused = counter("refused", "requests answered by an error", "status")
        self.tokens = counter("generated_tokens", "tokens generated", "tier")
        self.invalid = counter("invalid_confidences", "decisions without a valid confidence", "tier")
        self.failures = counter("backend_failures", "requests that a tier failed", "tier", "kind")
        self.confidence = Histogram(
            "coca_confidence", "confidence decided by", ["tier"], buckets=[i / 10 for i in range(1, 11)], registry=new
        )
        self.decision_seconds = seconds("decision_seconds", "until the decision")
        self.first_text_seconds = seconds("first_text_seconds", "until the first text")
        self.seconds = seconds("request_seconds", "whole requests")
        self.running = gauge("running_requests", "requests being answered")
        self.labels = counter("labels", "labels", "correct")
        self.log_errors = counter("log_errors", "failed writes of the request log")
        self.log_waiting = gauge("log_waiting_records", "records that could not be written yet")
        self.drift_evidence = gauge("drift_evidence", "of drift; alarm at 1", "kind")
        self.drift_alarm = gauge("drift_alarm", "1 since labels contradicted the calibration", "kind")

    def observe(self, trace: Trace, outcome: str, ended: float) -> None:
        self.requests.labels(trace.tier or "none", trace.action or "none", outcome).inc()
        for tier, tokens in trace.tokens.items():
            self.tokens.labels(tier).inc(tokens)
        for step in trace.steps:
            if "failed" in step:
                self.failures.labels(step["tier"], step["failed"]).inc()
            elif step["confidence"] is not None:
                self.confidence.labels(step["tier"]).observe(step["confidence"])
            elif step["reason"].startswith("no valid confidence"):
                self.invalid.labels(step["tier"]).inc()
        if trace.decided is not None:
            self.decision_seconds.observe(trace.decided - trace.started)
        if trace.first_text is not None:
            self.first_text_seconds.observe(trace.first_text - trace.started)
        self.seconds.observe(ended - trace.started)

    def observe_drift(self, alarm: "DriftAlarm") -> None:
        for name, watch in alarm.watches.items():
            self.drift_evidence.labels(name).set(watch.evidence)
            self.drift_alarm.labels(name).set(watch.alarm)


@dataclass
class EvidenceCusum:
    """Evidence that the mean of numbers in [-1, 1] has risen above 0; ``alarm`` stays set.

    The mean number of values between false alarms is at least ``run_length``.
    """

    run_length: float
    alarm: bool = False
    _capital: list[float] = field(default_factory=lambda: [1.0] * len(_STAKES))

    def add(self, value: float, scale: float = 1.0) -> None:
        """Add a value; ``value * scale`` has to stay above -1."""
        self._capital = [
            max(capital, 1.0) * (1 + stake * scale * value)
            for capital, stake in zip(self._capital, _STAKES, strict=True)
        ]
        # The mean of several CUSUMs of evidence is one itself.
        self.alarm = self.alarm or self.evidence >= 1

    @property
    def evidence(self) -> float:
        """Logarithm of the capital as a share of that at the alarm; 0 or less: none, 1: alarm."""
        mean = sum(self._capital) / len(self._capital)
        return math.log(mean) / math.log(self.run_length)


class DriftAlarm:
    """Watches whether confidences are too high or too low, and whether a certified error is exceeded."""

    def __init__(self, run_length: float, error: float | None = None) -> None:
        """``error`` is the certified share of wrong answers among those given; None: not watched."""
        self.error = error
        self.watches = {name: EvidenceCusum(run_length) for name in ("overconfident", "underconfident")}
        if error is not None:
            self.watches["risk"] = EvidenceCusum(run_length)

    def label(self, confidence: float | None, correct: bool, *, answered: bool) -> None:
        """Add a label; ``answered``: by a certified tier because of its confidence."""
        if confidence is not None:
            self.watches["overconfident"].add(confidence - correct)
            self.watches["underconfident"].add(correct - confidence)
        if self.error is not None and answered:
            # A right answer moves by -error only, so the stake may be larger than for numbers down to -1.
            self.watches["risk"].add((not correct) - self.error, scale=1 / max(self.error, 0.05))

    def alarms(self) -> list[str]:
        return [name for name, watch in self.watches.items() if watch.alarm]
