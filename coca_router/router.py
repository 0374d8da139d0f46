"""Answer a request: ask a tier, decide on its confidence, and escalate to the next tier."""

import asyncio
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coca_router.backends import Backend, BackendError
from coca_router.config import ServingConfig, TierConfig, TierPolicy
from coca_router.decision import Budget, Decision, ThresholdRule, answer_from, decide
from coca_router.http_server import AnswerWriter
from coca_router.openai_api import NEUTRAL_SAMPLING, ApiError, ChatRequest
from coca_router.output_stream import ConfidenceReader, OutputStream
from coca_router.trace import Trace

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tier:
    """A tier of the configuration, with its backend, threshold rule and pinned sampling."""

    config: TierConfig
    backend: Backend
    policy: TierPolicy

    @property
    def name(self) -> str:
        return self.config.name

    def pinned_sampling(self) -> dict[str, Any]:
        """Sampling parameters that the tier's calibration or certificate prescribes, if it has any."""
        pinned = self.policy.pinned
        return {} if pinned is None else {"temperature": pinned.temperature, **NEUTRAL_SAMPLING, **pinned.sampling}

    def sampling(self, request: ChatRequest, sample: int = 0) -> dict[str, Any]:
        """The sampling parameters for the engine; each sample has another seed."""
        pinned = self.pinned_sampling()
        values = pinned or request.sampling()
        if not pinned and self.config.temperature is not None:
            values["temperature"] = self.config.temperature
        unknown = ("top_k", "min_p", "repetition_penalty") if self.backend.config.dialect == "openai" else ()
        for name in ("logit_bias", *(unknown if pinned else ())):  # unknown to OpenAI's own servers
            if values.get(name) == NEUTRAL_SAMPLING[name]:
                del values[name]
        values.pop("max_tokens", None)
        if request.seed is not None:
            values["seed"] = request.seed ^ sample  # stays within 64 bits
        return values

    def check(self, request: ChatRequest, threshold: float | None) -> None:
        """Raise ApiError 400 for a request to which the tier's calibration or certificate does not apply."""
        pinned = self.pinned_sampling()
        if not pinned:
            return
        given = request.sampling()
        if given.get("top_k") == 0:
            given["top_k"] = -1
        if request.limit is not None and request.limit < pinned.get("max_tokens", 0):
            given["max_tokens"] = request.limit
        wrong = {
            name: f"{name} {pinned[name]!r}; leave {name} as it is" for name in given if given[name] != pinned[name]
        }
        if request.stops:
            wrong["stop"] = "no stop strings; send none"
        if any(message.role in ("system", "developer") for message in request.messages):
            wrong["messages"] = "its own system prompt; send none"
        if threshold is not None and self.policy.risk is not None:
            wrong["model"] = f"its own threshold; use the model {request.model.partition('@')[0]!r}"
        for name, allowed in wrong.items():
            done = "calibrated" if self.policy.risk is None else "certified"
            message = f"{name}: tier {self.name} is {done} with {allowed}"
            raise ApiError(400, message, param=name, code="pinned_parameter")

    def messages(self, request: ChatRequest) -> list[Mapping[str, Any]]:
        """The client's messages with the tier's prompt in front of their system message."""
        messages: list[Mapping[str, Any]] = [message.as_dict() for message in request.messages]
        if not self.config.prompt:
            return messages
        if messages[0]["role"] == "system":
            joined = {**messages[0], "content": f"{self.config.prompt}\n\n{messages[0]['content']}"}
            return [joined, *messages[1:]]
        return [{"role": "system", "content": self.config.prompt}, *messages]


@dataclass(frozen=True)
class Router:
    """Answers one request by the tiers of a configuration: fills the trace and writes the answer."""

    config: ServingConfig
    tiers: Sequence[Tier]
    request: ChatRequest
    threshold: float | None  # the confidence from which each tier but the last answers; None: the configuration's
    trace: Trace
    writer: AnswerWriter

    async def answer(self) -> None:
        """Raise BackendError if no tier that the policy allows gave a whole answer."""
        caps, trace = self.config.caps, self.trace
        escalations, failures = min(caps.escalations, len(self.tiers) - 1), list[str]()
        budget = Budget(escalations, caps.tokens, caps.exhausted)
        for index, tier in enumerate(self.tiers):
            last = index + 1 == len(self.tiers)
            rule = tier.policy.rule
            if self.threshold is not None and rule is not None and not last:
                rule = answer_from(self.threshold, rule.invalid if rule.invalid != "answer" else "escalate")
            budget = replace(budget, escalations=escalations - index, tokens=self.tokens_left())
            try:
                decision = await self._ask(tier, rule, budget)
            except BackendError as error:
                # A backend's own message may quote the prompt.
                message = "it rejected the request" if error.kind == "rejected" else str(error)
                where = f"{tier.backend.name} at {tier.backend.address}"
                _LOG.warning("backend %s failed, %s: %s; request %s", where, error.kind, message, trace.id)
                trace.add_failure(tier.name, error.kind)
                failures.append(str(error))
                last = last or budget.escalations < 1 or self.tokens_left() == 0
                if last or self.config.on_error == "fail" or not self.writer.discard():
                    raise BackendError(error.kind, "; ".join(failures), error.retry_after) from error
                decision = Decision("escalate", f"{tier.name} failed: {error.kind}")
            if decision.action == "answer":
                return
            if decision.action == "refuse":
                await self.writer.write(self.config.refusal)
                trace.finish_reason = "stop"
                return

    def tokens_left(self) -> int | None:
        cap = self.config.caps.tokens
        return None if cap is None else max(0, cap - sum(self.trace.tokens.values()))

    async def _ask(self, tier: Tier, rule: ThresholdRule | None, budget: Budget) -> Decision:
        """Ask one tier; after the decision ``answer`` the answer has been given."""
        trace = self.trace
        trace.stated_confidence = trace.answer_probability = trace.confidence = None
        trace.tokens_to_confidence = trace.basis = trace.prompt_tokens = None
        trace.decides = rule is not None and budget.tokens != 0
        if budget.tokens == 0:
            decision = Decision("refuse", "the request's tokens are spent")
            trace.add_decision(tier.name, decision)
            return decision
        if rule is None:
            trace.add_decision(tier.name, Decision("answer", "the tier states no confidence"))
            return await self._stream(tier, rule, budget, [])
        more, limit = tier.config.confidence.samples - 1, tier.config.max_confidence_tokens
        if budget.tokens is not None and more:
            more = min(more, budget.tokens - 1)
            limit = min(limit, budget.tokens // (more + 1))
            budget = replace(budget, tokens=budget.tokens - more * limit)
        others = [asyncio.create_task(self._state(tier, sample + 1, limit)) for sample in range(more)]
        try:
            return await self._stream(tier, rule, budget, others)
        finally:
            for task in others:  # a failure of one ends the others
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _state(self, tier: Tier, sample: int, limit: int) -> tuple[float | None, int]:
        """One more confidence and its tokens; the request is aborted at the closing tag."""
        asked = tier.messages(self.request), limit, tier.sampling(self.request, sample)
        reader, seen = ConfidenceReader(), 0
        async with tier.backend.stream(*asked) as chunks:
            async for chunk in chunks:
                self.trace.tokens[tier.name] += chunk.tokens
                seen += chunk.tokens
                reader.feed(chunk.text)
                if reader.state != "reading":
                    break
        reader.finish()
        return reader.confidence, seen

    async def _stream(
        self,
        tier: Tier,
        rule: ThresholdRule | None,
        budget: Budget,
        others: Sequence[asyncio.Task[tuple[float | None, int]]],
    ) -> Decision:
        """Ask by one streamed request, which is aborted at the closing tag if its answer is not wanted.

        ``others`` state the further confidences of a mean.
        """
        trace, request, allowance = self.trace, self.request, tier.config.max_confidence_tokens
        limit = least(request.limit, tier.pinned_sampling().get("max_tokens"))
        if limit is not None and tier.config.states_confidence:
            limit += allowance
        # The log-probs are known after the answer, which is held back until then.
        by_log_prob, log_probs = tier.config.confidence.source == "answer_logprob", list[float]()
        held: list[str] = []

        async def hold(text: str) -> None:
            held.append(text)

        sampling = tier.sampling(request) | ({"logprobs": True} if by_log_prob else {}) | (request.passed() or {})
        asked = tier.messages(request), least(budget.tokens, limit), sampling
        reader = ConfidenceReader() if tier.config.states_confidence else None
        client_limit = request.limit if tier.backend.config.dialect == "vllm" else None
        output = OutputStream(hold if by_log_prob else self.writer.write, request.stops, client_limit)
        seen = counted = 0  # counted by us to the confidence, and by the engine in all
        own = theirs = 0  # tokens of this confidence and of the others
        async with tier.backend.stream(*asked) as chunks:
            async for chunk in chunks:
                trace.tokens[tier.name] += chunk.tokens
                if chunk.usage is not None:  # so far, or of the whole answer
                    trace.prompt_tokens, counted = chunk.usage
                text, tokens = chunk.text, chunk.tokens
                if output.finish_reason is None:
                    log_probs += chunk.log_probs
                if reader is not None:
                    seen += tokens
                    text = reader.feed(text)
                    if reader.state == "reading" and (chunk.finish_reason or seen > allowance):
                        text += reader.finish()
                    if reader.state == "reading":
                        continue
                    if reader.state == "valid":  # the tokens of the chunk that closes the tag count as the confidence's
                        own, tokens, log_probs = seen, 0, []
                        output.begin_after_confidence()
                    further = await asyncio.gather(*others)
                    confidence, reader = mean_confidence([reader.confidence, *(stated for stated, _ in further)]), None
                    theirs = sum(count for _, count in further)
                    trace.tokens_to_confidence = None if confidence is None else own + theirs
                    trace.stated_confidence = confidence
                    decision = None if by_log_prob else self._decide(tier, rule, budget, confidence)
                    if decision is not None and decision.action != "answer":
                        return decision
                if chunk.tool_calls:
                    await self.writer.write_calls(chunk.tool_calls)
                await output.feed(text, tokens, chunk.finish_reason)
                if output.finish_reason and not chunks.finished:  # a limit of the client ended it before the engine did
                    break
        if reader is not None:
            raise BackendError("cut", f"backend {tier.backend.name} ended before a confidence could be read")
        if counted and not output.cut:
            # Chunks were counted so far; one may hold several tokens.
            trace.tokens[tier.name] = theirs + counted
            output.tokens = max(0, counted - own)
        await output.close()
        if by_log_prob:
            if (text := "".join(held)) and not log_probs:
                raise BackendError("failed", f"backend {tier.backend.name} names no log-probs; check its model and url")
            # Rounding may put a mean log-prob above 0.
            mean = math.exp(min(statistics.fmean(log_probs), 0.0)) if log_probs else math.nan
            trace.answer_probability = None if math.isnan(mean) else mean
            decision = self._decide(tier, rule, budget, trace.answer_probability)
            if decision.action != "answer":
                return decision
            await self.writer.write(text)
        trace.answer_tokens, trace.finish_reason = output.tokens, output.finish_reason
        if output.cut or (output.finish_reason == "length" and request.limit is not None):
            trace.basis = None
        return Decision("answer", "answered")

    def _decide(self, tier: Tier, rule: ThresholdRule | None, budget: Budget, found: float | None) -> Decision:
        """Decide by a confidence, recalibrated where the tier has a map, and note it in the trace."""
        assert rule is not None
        trace = self.trace
        trace.confidence = None if found is None else tier.policy.recalibrate(found)
        decision = decide(trace.confidence, rule, budget)
        if found is not None:
            trace.basis = "exhausted" if decision.exhausted else "confidence"
        trace.add_decision(tier.name, decision)
        return decision


def mean_confidence(stated: Sequence[float | None]) -> float | None:
    """The mean of the valid ones; None where the first, whose answer is given, or more than half are invalid.

    A mean of several is rounded to 12 digits, so that equal confidences and their mean lie in the same band.
    """
    valid = [confidence for confidence in stated if confidence is not None]
    if stated[0] is None or 2 * len(valid) < len(stated):
        return None
    return valid[0] if len(stated) == 1 else round(statistics.fmean(valid), 12)


def least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
