"""The record of one request, for its answer's fields and headers, the log and the metrics; holds no text of it."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from coca_router.decision import Decision


@dataclass(slots=True)
class Trace:
    """Filled while the request is answered.

    Attributes:
        tier: the tier asked last.
        basis: why an answer that states its confidence was given: the confidence, or a cap that allowed no escalation;
            None for other answers, and where a limit of the client's cut it.
        stated: confidence as the model stated it; None where it is invalid or absent.
        confidence: the confidence used for the decision, recalibrated where the tier has a map.
        tokens_to_confidence: generated at ``tier`` until the decision.
        tokens: generated, by tier.
        prompt_tokens: at ``tier``; 0 where the engine does not count.
        started, decided, first_text: seconds of a monotonic clock.
    """

    id: str
    domain: str | None = None
    tier: str = ""
    action: str = ""
    reason: str = ""
    basis: Literal["confidence", "exhausted"] | None = None
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

    def add_tokens(self, tier: str, tokens: int) -> None:
        self.tokens[tier] = self.tokens.get(tier, 0) + tokens

    def add_decision(self, tier: str, decision: Decision) -> None:
        self.tier, self.action, self.reason = tier, decision.action, decision.reason
        self.decided = time.monotonic()
        step = {"tier": tier, "action": decision.action, "confidence": self.confidence, "reason": decision.reason}
        self.steps.append(step)

    def fields(self) -> dict[str, Any]:
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
        """The response headers, as far as they are known when the answer begins."""
        return {
            "x-request-id": self.id,
            "x-coca-confidence": "invalid" if self.confidence is None else f"{self.confidence:.6g}",
            "x-coca-action": self.action,
            "x-coca-tier": self.tier,
            "x-coca-tokens": str(sum(self.tokens.values())),
        }

    def record(self, outcome: str, ended: float) -> dict[str, Any]:
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
