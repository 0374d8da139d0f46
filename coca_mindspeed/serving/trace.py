"""What became of one request: for its answer's fields and headers, the log and the metrics."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from coca_mindspeed.serving.decision import Decision

#: Why an answer was given: by the confidence that it states; by that confidence and the second gate; as the winner of a
#: vote; because the budget allowed nothing else; because shadow mode gives every answer.
Basis = Literal["confidence", "gate", "vote", "exhausted", "shadow"]


@dataclass(slots=True)
class Trace:
    """Filled while the request is worked on; holds no text of it.

    Attributes:
        id: of the request.
        domain: whose calibration map was used, as the client named it.
        tier: that answered, or was asked last.
        action: what was done in the end.
        reason: why.
        basis: on what grounds the answer was given; None where it states no confidence.
        stated: the confidence as the model stated it, None where it is invalid or none was asked for.
        confidence: what was decided by: recalibrated, where the tier has a map.
        tokens_to_confidence: generated at ``tier`` until its confidence was known.
        tokens: generated, by tier.
        cost: of the tokens, by the tiers' prices.
        prompt_tokens: of the prompt at ``tier``, 0 where the engine did not say.
        answer_tokens: of the answer that was given.
        steps: what was decided at each tier on the way, and what failed.
        shadow: what would have been done, in shadow mode.
        finish_reason: ``stop`` or ``length`` of a whole answer.
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
    cost: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    shadow: dict[str, Any] | None = None
    finish_reason: str | None = None
    started: float = field(default_factory=time.monotonic)
    decided: float | None = None
    first_text: float | None = None

    def generated(self, tier: str, tokens: int, price: float) -> None:
        """Count tokens."""
        self.tokens[tier] = self.tokens.get(tier, 0) + tokens
        self.cost += tokens * price

    def decide(self, tier: str, decision: Decision) -> None:
        """Note a decision; the last one stands."""
        self.tier, self.action, self.reason = tier, decision.action, decision.reason
        self.decided = time.monotonic()
        step = {"tier": tier, "action": decision.action, "confidence": self.confidence, "reason": decision.reason}
        self.steps.append(step)

    def fields(self) -> dict[str, Any]:
        """What a client is told, in the field ``coca`` of an answer."""
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
        confidence = "invalid" if self.confidence is None else f"{self.confidence:.6g}"
        return {
            "x-request-id": self.id,
            "x-coca-confidence": confidence,
            "x-coca-action": self.action,
            "x-coca-tier": self.tier,
            "x-coca-tokens": str(sum(self.tokens.values())),
        }
