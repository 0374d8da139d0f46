"""Prometheus metrics of the proxy; their labels hold names of the configuration and no text of a request."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coca_router.trace import Trace

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServingMetrics:
    """The metrics of one proxy."""

    def __init__(self) -> None:
        self.registry = new = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"coca_{name}", text, labels, registry=new)

        self.requests = counter("requests", "requests and their outcome", "tier", "action", "outcome")
        self.refused = counter("refused", "requests answered by an error", "status")
        self.tokens = counter("generated_tokens", "tokens generated", "tier")
        self.invalid = counter("invalid_confidences", "decisions without a valid confidence", "tier")
        self.failures = counter("backend_failures", "requests that a tier failed", "tier", "kind")
        self.labels = counter("labels", "labels", "correct")
        self.log_errors = counter("log_errors", "failed writes of the request log")
        self.log_waiting = Gauge("coca_log_waiting_records", "records that could not be written yet", registry=new)
        self.running = Gauge("coca_running_requests", "requests being answered", registry=new)
        self.decision_seconds, self.seconds = (
            Histogram(f"coca_{name}_seconds", text, buckets=_SECONDS, registry=new)
            for name, text in (("decision", "until the decision"), ("request", "whole requests"))
        )

    def observe(self, trace: Trace, outcome: str, ended: float) -> None:
        self.requests.labels(trace.tier or "none", trace.action or "none", outcome).inc()
        for tier, tokens in trace.tokens.items():
            self.tokens.labels(tier).inc(tokens)
        for step in trace.steps:
            if "failed" in step:
                self.failures.labels(step["tier"], step["failed"]).inc()
            elif step["reason"].startswith("no valid confidence"):
                self.invalid.labels(step["tier"]).inc()
        if trace.decided is not None:
            self.decision_seconds.observe(trace.decided - trace.started)
        self.seconds.observe(ended - trace.started)
