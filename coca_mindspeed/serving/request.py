"""One request on its way: what it asks for, what it may spend, what was decided, and where its answer goes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from coca_mindspeed.serving.answer_flow import AnswerFlow
from coca_mindspeed.serving.backends import Generate
from coca_mindspeed.serving.decision import Budget, Decision, decide, decide_after
from coca_mindspeed.serving.openai_format import Ask
from coca_mindspeed.serving.serving_config import ServingConfig, answer_gate
from coca_mindspeed.serving.tier import Messages, Tier
from coca_mindspeed.serving.trace import Trace


class Sink(Protocol):
    """Where an answer goes."""

    async def begin(self, trace: Trace, text: str) -> None:
        """An answer (or refusal) begins, by ``text`` if there is any yet; tier, action and confidence are known."""
        ...

    async def text(self, text: str) -> None:
        """More of it."""
        ...

    def take_back(self) -> bool:
        """Forget what was given; False where the client has seen some of it."""
        ...


@dataclass(frozen=True)
class RoutedRequest:
    """What every way of asking a tier needs of a request.

    Attributes:
        config: the policy.
        ask: as the client put it.
        trace: filled on the way.
        sink: takes the answer.
        shadow: whether a decision is noted and the answer given whatever it is.
    """

    config: ServingConfig
    ask: Ask
    trace: Trace
    sink: Sink
    shadow: bool = False

    @property
    def messages(self) -> Messages:
        """Of the client."""
        return self.ask.messages or ()

    def whole_budget(self) -> Budget:
        """What the caps allow of a request that has not climbed yet, less the tokens that it has spent."""
        caps = self.config.caps
        return Budget(min(caps.escalations, len(self.config.tiers) - 1), caps.samples, caps.hooks,
                      self.tokens_left(), caps.exhausted)  # fmt: skip

    def tokens_left(self) -> int | None:
        """That it may still generate; None: no cap."""
        cap = self.config.caps.tokens
        return None if cap is None else max(0, cap - sum(self.trace.tokens.values()))

    def generate(self, tier: Tier, messages: Messages, budget: Budget) -> Generate:
        """What a tier is asked for a whole response."""
        config = tier.config
        allowance = config.max_confidence_tokens if config.states_confidence else 0
        limits = [budget.tokens, None if self.ask.max_tokens is None else self.ask.max_tokens + allowance]
        return replace(self.go_on(tier), messages=tier.messages(messages), max_tokens=least(*limits))

    def go_on(self, tier: Tier) -> Generate:
        """How answers of a tier are sampled; from what, the caller says."""
        gate = tier.config.after_answer
        return Generate(
            temperature=self.temperature(tier),
            log_probs=0 if gate is not None and gate.mean_log_prob is not None else None,
            others=self.ask.others,
        )

    def temperature(self, tier: Tier) -> float | None:
        """The tier's, else the client's."""
        return self.ask.temperature if tier.config.temperature is None else tier.config.temperature

    def decide(self, tier: Tier, stated: float | None, budget: Budget) -> Decision:
        """Note a stated confidence and what it means at a tier."""
        trace = self.trace
        trace.stated = stated
        trace.confidence = None if stated is None else tier.recalibrate(stated, trace.domain)
        assert tier.rule is not None, "only a tier that states a confidence decides by one"
        decision = decide(trace.confidence, tier.rule, budget)
        trace.basis = None if stated is None else "exhausted" if decision.exhausted else "confidence"
        if self.shadow:
            trace.shadow = {"tier": tier.name, "action": decision.action, "reason": decision.reason}
            trace.shadow["confidence"] = trace.confidence
            trace.basis = None if stated is None else "shadow"
            decision = Decision("answer", "shadow mode")
        trace.decide(tier.name, decision)
        return decision

    def flow(self, tier: Tier, *, kept: bool = False) -> AnswerFlow:
        """The way of a tier's answer to the client; or to whoever asked for it, where it is ``kept``."""
        exact = tier.backend.config.dialect == "vllm"
        return AnswerFlow(
            None if kept else partial(self.sink.begin, self.trace),
            None if kept else self.sink.text,
            stops=self.ask.stops,
            max_tokens=self.ask.max_tokens if exact else None,
            held=tier.config.after_answer is not None,
        )

    async def close(self, tier: Tier, flow: AnswerFlow, budget: Budget) -> Decision:
        """The answer has ended: give what is left of it, or not, where a second gate says so."""
        decision = self.look_again(tier, flow, budget)
        if decision is not None and decision.action != "answer":
            return decision
        await flow.close()
        self.trace.answer_tokens, self.trace.finish_reason = flow.tokens, flow.finish_reason
        return Decision("answer", "answered")

    def look_again(self, tier: Tier, flow: AnswerFlow, budget: Budget) -> Decision | None:
        """Note what the tier's second gate says of a whole answer; None where there is no gate, or shadow mode."""
        if tier.config.after_answer is None:
            return None
        decision = decide_after(
            answer_gate(tier.config.after_answer),
            replace(budget, tokens=self.tokens_left()),
            cut_off=flow.finish_reason == "length",
            mean_log_prob=flow.mean_log_prob,
        )
        trace = self.trace
        if self.shadow:
            said = {"action": decision.action, "reason": decision.reason}
            trace.shadow = {**(trace.shadow or {}), "after_answer": said}
            return None
        trace.decide(tier.name, decision)
        trace.basis = None if trace.stated is None else "gate"
        return decision


def least(*limits: int | None) -> int | None:
    """The smallest of those that are limits; None where none is."""
    return min((limit for limit in limits if limit is not None), default=None)
