"""From a request to its answer: ask a tier, and do what its confidence says, up the ladder."""

from collections.abc import Sequence
from dataclasses import replace

import aiohttp
import anyio

from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.decision import Budget, Decision
from coca_mindspeed.serving.hook import with_context
from coca_mindspeed.serving.one_request import probe, read
from coca_mindspeed.serving.openai_format import Ask
from coca_mindspeed.serving.request import RoutedRequest, Sink
from coca_mindspeed.serving.serving_config import ServingConfig
from coca_mindspeed.serving.side_by_side import side_by_side
from coca_mindspeed.serving.tier import Messages, Tier
from coca_mindspeed.serving.trace import Trace
from coca_mindspeed.serving.two_requests import stop_and_go_on
from coca_mindspeed.serving.vote import vote

_PROBE_ENDS_IN_S = 0.5  # a confidence is a dozen tokens: it is nearly always there before the answer


class Router:
    """Answers requests by the tiers of a configuration."""

    def __init__(self, config: ServingConfig, tiers: Sequence[Tier], session: aiohttp.ClientSession) -> None:
        self._config, self._tiers, self._session = config, tiers, session

    async def answer(self, ask: Ask, trace: Trace, sink: Sink) -> None:
        """Answer, and fill the trace.

        Raises:
            BackendError: no tier that the policy allows gave a whole answer.
        """
        request = RoutedRequest(self._config, ask, trace, sink, shadow=self._config.shadow is not None)
        if self._config.shadow is None:
            await self._climb(request)
        else:
            await self._shadow(request, self._config.shadow.serve)

    async def _shadow(self, request: RoutedRequest, serve: str) -> None:
        """Let one tier answer, and note what the first would have had done."""
        served, first = next(tier for tier in self._tiers if tier.name == serve), self._tiers[0]
        if served is first or not first.config.states_confidence:
            await ask_tier(request, served, request.messages, request.whole_budget())
            return
        trace = request.trace
        probed = replace(request, trace=Trace(trace.id, trace.domain))
        # The client does not wait for the probe longer than a moment, whatever the first tier does.
        probing = anyio.CancelScope()

        async def answer() -> Decision:
            try:
                return await ask_tier(request, served, request.messages, request.whole_budget())
            finally:
                probing.deadline = anyio.current_time() + _PROBE_ENDS_IN_S

        async def look() -> None:
            with probing:
                await probe(probed, first)

        [answered, _] = await side_by_side(answer, look)
        trace.shadow = probed.trace.shadow or {
            "tier": first.name,
            "action": "none",
            "reason": "the probe failed, or was not done when the answer was",
        }
        for tier, tokens in probed.trace.tokens.items():
            trace.generated(tier, tokens, first.config.price)
        if isinstance(answered, BackendError):
            raise answered

    async def _climb(self, request: RoutedRequest) -> None:
        """From tier to tier until one answers or refuses."""
        messages, budget, index = request.messages, request.whole_budget(), 0
        while True:
            tier = self._tiers[index]
            budget = replace(budget, tokens=request.tokens_left())
            try:
                decision = await ask_tier(request, tier, messages, budget)
                if decision.action == "hook":
                    assert self._config.hook is not None
                    messages = await with_context(self._session, self._config.hook, messages, request.trace)
                    budget = budget.spend(hooks=1)
                    continue
                if decision.action == "sample":
                    decision = await vote(request, tier, messages, decision.samples, budget)
            except BackendError as error:
                request.trace.steps.append({"tier": tier.name, "failed": error.kind})
                last = index + 1 == len(self._tiers) or budget.escalations < 1 or budget.tokens == 0
                if last or self._config.on_error == "fail" or not request.sink.take_back():
                    raise
                decision = Decision("escalate", f"{tier.name} failed: {error.kind}")
            if decision.action in ("answer", "sample"):
                return
            if decision.action == "refuse":
                await request.sink.begin(request.trace, self._config.refusal)
                request.trace.finish_reason = "stop"
                return
            budget = budget.spend(escalations=1)
            index += 1


async def ask_tier(request: RoutedRequest, tier: Tier, messages: Messages, budget: Budget) -> Decision:
    """Ask one tier in the way that its configuration says; ``answer`` says that it was given."""
    config, trace = tier.config, request.trace
    if config.states_confidence:
        two = config.style == "two_requests" or config.confidence.source != "stated"
        return await (stop_and_go_on if two else read)(request, tier, messages, budget)
    trace.stated = trace.confidence = trace.tokens_to_confidence = trace.basis = None
    if budget.tokens == 0:
        decision = Decision("refuse", "the request's tokens are spent")
        trace.decide(tier.name, decision)
        return decision
    trace.decide(tier.name, Decision("answer", "the tier states no confidence"))
    return await read(request, tier, messages, budget)
