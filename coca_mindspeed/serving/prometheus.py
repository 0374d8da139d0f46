"""Prometheus metrics of the proxy; labels are names of the configuration, never anything of a request."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coca_mindspeed.serving.trace import Trace

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServingMetrics:
    """The metrics of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = new = CollectorRegistry()
        self.requests = Counter(
            "coca_requests", "requests and their outcome", ["tier", "action", "outcome"], registry=new
        )
        self.tokens = Counter("coca_generated_tokens", "tokens generated, by tier", ["tier"], registry=new)
        self.cost = Counter("coca_cost", "price of the generated tokens", registry=new)
        self.invalid = Counter(
            "coca_invalid_confidences", "decisions without a valid confidence", ["tier"], registry=new
        )
        self.failures = Counter("coca_backend_failures", "requests that a tier failed", ["tier", "kind"], registry=new)
        self.confidence = Histogram(
            "coca_confidence", "confidence decided by", ["tier"], buckets=[i / 10 for i in range(1, 11)], registry=new
        )
        self.decision_seconds = Histogram(
            "coca_decision_seconds", "until it was decided", buckets=_SECONDS, registry=new
        )
        self.first_text_seconds = Histogram(
            "coca_first_text_seconds", "until text came", buckets=_SECONDS, registry=new
        )
        self.seconds = Histogram("coca_request_seconds", "whole requests", buckets=_SECONDS, registry=new)
        self.running = Gauge("coca_running_requests", "requests being worked on", registry=new)
        self.labels = Counter("coca_labels", "delayed labels", ["correct"], registry=new)
        self.drift_evidence = Gauge("coca_drift_evidence", "of drift; alarm at 1", ["kind"], registry=new)
        self.drift_alarm = Gauge(
            "coca_drift_alarm", "1 since labels contradicted the calibration", ["kind"], registry=new
        )

    def observe(self, trace: Trace, outcome: str, ended: float) -> None:
        """Count one request."""
        self.requests.labels(trace.tier or "none", trace.action or "none", outcome).inc()
        self.cost.inc(trace.cost)
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

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
