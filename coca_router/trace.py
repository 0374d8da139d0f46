"""The record of one request, for its answer's fields and headers, and the log; it holds no text."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from coca_router.decision import Decision

_FIELDS = (
    *("confidence", "stated_confidence", "answer_probability", "action", "tier", "reason", "tokens_to_confidence"),
    "tokens",
)
_LOGGED = ("id", "domain", *_FIELDS, "basis", "form", "prompt_tokens", "answer_tokens", "finish_reason", "steps")


@dataclass(slots=True)
class Trace:
    """Filled while the request is answered."""

    id: str
    domain: str | None = None
    tier: str = ""  # asked last
    decides: bool = False  # whether a confidence decides on the answer of ``tier``
    form: str | None = None  # digest of its prompt's form
    action: str = ""
    reason: str = ""
    # Why an answer with a confidence was given: exhausted where a cap allowed no escalation. None for other answers,
    # and where a limit of the client cut it.
    basis: Literal["confidence", "exhausted"] | None = None
    stated_confidence: float | None = None  # None: invalid or absent
    answer_probability: float | None = None  # exp(mean log-prob of the answer's tokens), of a tier that decides by it
    confidence: float | None = None  # used for the decision, recalibrated where the tier has a map
    tokens_to_confidence: int | None = None  # generated at ``tier`` until the stated confidence was known
    tokens: Counter[str] = field(default_factory=Counter)  # generated, by tier
    prompt_tokens: int | None = None  # at ``tier``; None where the engine does not count
    answer_tokens: int = 0
    thought_tokens: int | None = None  # of a tier whose model thinks, known at the end
    steps: list[dict[str, Any]] = field(default_factory=list)  # a row for each tier: its confidence, and what followed
    finish_reason: str | None = None
    started: float = field(default_factory=time.monotonic)  # seconds of a monotonic clock
    decided: float | None = None

    def add_decision(self, tier: str, decision: Decision) -> None:
        failed = [f"{step['tier']} failed: {step['reason']}" for step in self.steps if step["action"] == "fail"]
        self.tier, self.action, self.reason = tier, decision.action, "; ".join([*failed, decision.reason])
        self.decided = time.monotonic()
        self._add_step(tier, decision.action, decision.reason)

    def add_failure(self, tier: str, kind: str) -> None:
        """Note that a tier gave no whole answer, also after it had decided to answer."""
        self._add_step(tier, "fail", kind)

    def _add_step(self, tier: str, action: str, reason: str) -> None:
        if self.steps and self.steps[-1]["tier"] == tier:
            self.steps.pop()
        self.steps.append({"tier": tier, "confidence": self.confidence, "action": action, "reason": reason})

    def fields(self) -> dict[str, Any]:
        """The field ``coca`` of an answer."""
        thought = {} if self.thought_tokens is None else {"thought_tokens": self.thought_tokens}
        return {**{name: getattr(self, name) for name in _FIELDS}, **thought, "tiers": self.steps}

    def headers(self) -> dict[str, str]:
        """The response headers, as far as they are known when the answer begins."""
        missing = "invalid" if self.decides else "none"
        return {
            "x-request-id": self.id,
            "x-coca-confidence": missing if self.confidence is None else f"{self.confidence:.6g}",
            "x-coca-action": self.action,
            "x-coca-tier": self.tier,
            "x-coca-tokens": str(sum(self.tokens.values())),
        }

    def record(self, outcome: str, ended: float) -> dict[str, Any]:
        """The row of the request log."""
        row = {name: getattr(self, name) for name in _LOGGED}
        decision = None if self.decided is None else self.decided - self.started
        return {**row, "outcome": outcome, "seconds_to_decision": decision, "seconds": ended - self.started}
