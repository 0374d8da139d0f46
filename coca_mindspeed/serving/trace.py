"""The record of one request: for its answer's fields and headers, the log and the metrics."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from coca_mindspeed.serving.decision import Decision

#: The grounds of an answer: its confidence, or a cap that allowed nothing else.
Basis = Literal["confidence", "exhausted"]


@dataclass(slots=True)
class Trace:
    """Filled while the request is answered; holds no text of it.

    Attributes:
        id: of the request.
        domain: of the calibration map, as the client named it.
        tier: that answered, or was asked last.
        action: taken in the end.
        reason: for it.
        basis: the grounds of an answer that states its confidence; None for any other, and where a limit of the
            client's own cut it.
        stated: the confidence as the model stated it; None where it is invalid or none was asked for.
        confidence: the one that was decided by: recalibrated, where the tier has a map.
        tokens_to_confidence: generated at ``tier`` until its confidence was known.
        tokens: generated, by tier.
        prompt_tokens: of the prompt at ``tier``, 0 where the engine did not say.
        answer_tokens: of the answer.
        steps: decisions and failures at each tier.
        finish_reason: of a whole answer.
        started, decided, first_text: seconds of a monotonic clock.
    """

    id: str
    domain: str | None = None
    tier: str = ""
    action: str = ""
    reason: str = ""
    basis: Basis | None = None
    stated: float | None = None
    confidence: float | None = None
    tokens_to_confidence: int | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    started: float = field(default_factory=time.monotonic)
    decided: float | None = None
    first_text: float | None = None

    def generated(self, tier: str, tokens: int) -> None:
        """Count tokens."""
        self.tokens[tier] = self.tokens.get(tier, 0) + tokens

    def decide(self, tier: str, decision: Decision) -> None:
        """Note a decision; the last one stands."""
        self.tier, self.action, self.reason = tier, decision.action, decision.reason
        self.decided = time.monotonic()
        step = {"tier": tier, "action": decision.action, "confidence": self.confidence, "reason": decision.reason}
        self.steps.append(step)

    def fields(self) -> dict[str, Any]:
        """The field ``coca`` of an answer."""
        return {
            "confidence": self.confidence,
            "stated_confidence": self.stated,
            "action": self.action,
            "tier": self.tier,
            "reason": self.reason,
            "tokens_to_confidence": self.tokens_to_confidence,
            "tokens": dict(self.tokens),
        }

    def headers(self) -> dict[str, str]:
        """The same in headers, as far as it is known when the answer begins."""
        return {
            "x-request-id": self.id,
            "x-coca-confidence": "invalid" if self.confidence is None else f"{self.confidence:.6g}",
            "x-coca-action": self.action,
            "x-coca-tier": self.tier,
            "x-coca-tokens": str(sum(self.tokens.values())),
        }

    def record(self, outcome: str, ended: float) -> dict[str, Any]:
        """The row of the request log."""
        return {
            "id": self.id,
            "domain": self.domain,
            "outcome": outcome,
            **self.fields(),
            "basis": self.basis,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "finish_reason": self.finish_reason,
            "steps": self.steps,
            "seconds_to_decision": None if self.decided is None else self.decided - self.started,
            "seconds": ended - self.started,
        }
