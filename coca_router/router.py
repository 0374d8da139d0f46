"""Answer a request: ask a tier, decide on its confidence, and escalate to the next tier."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coca_mindspeed.algorithm.parsing import CLOSE_TAG
from coca_router.backends import Backend, Generate, gather
from coca_router.chunks import BackendError, Chunk
from coca_router.config import ServingConfig, TierConfig, TierPolicy
from coca_router.decision import Budget, Decision, ThresholdRule, answer_from, decide
from coca_router.http_server import Reply
from coca_router.openai_api import NEUTRAL_SAMPLING, ApiError, ChatRequest, Envelope, usage
from coca_router.output_stream import ConfidenceReader, OutputStream, mean_confidence
from coca_router.trace import Trace

Messages = Sequence[Mapping[str, Any]]

_LOG = logging.getLogger(__name__)


class ClientSink:
    """Writes an answer, streamed or whole; ``given`` is the text of a whole or logged one."""

    def __init__(self, chat: ChatRequest, trace: Trace, reply: Reply, *, keep: bool) -> None:
        self._stream, self._keep = bool(chat.stream), keep
        self._trace, self._reply = trace, reply
        self._envelope = Envelope(trace.id, chat.model, usage=chat.stream_usage)
        self._text_chunk = self._envelope.text_chunks()
        self.given = ""

    async def write(self, text: str) -> None:
        """Send text; the first call begins the answer, also with an empty text."""
        if text and self._trace.first_text is None:
            self._trace.first_text = time.monotonic()
        if self._keep or not self._stream:
            self.given += text
        if self._stream and not self._reply.begun:
            await self._reply.begin_stream(self._trace.headers())
            first = self._envelope.chunk("", first=True, coca=self._trace.fields())
            await self._reply.send(first + self._text_chunk(text) if text else first)
        elif self._stream and text:
            await self._reply.send(self._text_chunk(text))

    def take_back(self) -> bool:
        if not self._reply.begun:
            self.given = ""
        return not self._reply.begun

    async def end(self) -> None:
        trace = self._trace
        reason = trace.finish_reason or "stop"
        counted = usage(trace.prompt_tokens, trace.answer_tokens)
        if not self._stream:
            whole = self._envelope.whole(self.given, reason, counted, {}, coca=trace.fields())
            await self._reply.json(whole, trace.headers())
            return
        last = self._envelope.chunk(finish_reason=reason, coca=trace.fields())
        await self._reply.send(last + self._envelope.end(counted), more=False)


@dataclass(frozen=True)
class Tier:
    """A tier of the configuration, with its backend, threshold rule and pinned sampling."""

    config: TierConfig
    backend: Backend
    policy: TierPolicy

    @property
    def name(self) -> str:
        return self.config.name

    def pinned_sampling(self) -> dict[str, Any] | None:
        """The sampling parameters that the tier's calibration or certificate prescribes, if it has one."""
        pinned = self.policy.pinned
        return None if pinned is None else {"temperature": pinned.temperature, **NEUTRAL_SAMPLING, **pinned.sampling}

    def sampling(self, request: ChatRequest, sample: int = 0) -> dict[str, Any]:
        """The sampling parameters for the engine; further samples get further seeds."""
        pinned = self.pinned_sampling()
        values = request.sampling() if pinned is None else pinned
        if pinned is None and self.config.temperature is not None:
            values["temperature"] = self.config.temperature
        unknown = ("top_k", "min_p", "repetition_penalty") if self.backend.config.dialect == "openai" else ()
        for name in ("logit_bias", *(unknown if pinned else ())):  # unknown to OpenAI's own servers
            if name in values and values[name] == NEUTRAL_SAMPLING[name]:
                del values[name]
        values.pop("max_tokens", None)
        if request.seed is not None:
            values["seed"] = request.seed + sample
        return values

    def check(self, request: ChatRequest, threshold: float | None) -> None:
        """Raise ApiError 400 for a request to which the tier's calibration or certificate does not apply."""
        pinned = self.pinned_sampling()
        if pinned is None:
            return
        given = request.sampling()
        if given.get("top_k") == 0:
            given["top_k"] = -1
        if request.limit is not None and request.limit < pinned.get("max_tokens", 0):
            given["max_tokens"] = request.limit
        wrong = {name: f"{name} {pinned[name]!r}" for name in given if given[name] != pinned[name]}
        if request.stops:
            wrong["stop"] = "no stop strings"
        if any(message.role in ("system", "developer") for message in request.messages):
            wrong["messages"] = "its own system prompt"
        if threshold is not None and self.policy.risk is not None:
            wrong["model"] = "its own threshold (use the name without @)"
        for name, allowed in wrong.items():
            done = "calibrated" if self.policy.risk is None else "certified"
            message = f"{name}: tier {self.name} is {done} with {allowed}; leave {name} as it is"
            raise ApiError(400, message, param=name, code="pinned_parameter")

    def messages(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The client's messages with the tier's prompt in front of their system message."""
        if not self.config.states_confidence:
            return list(messages)
        if messages[0]["role"] == "system":
            joined = {**messages[0], "content": f"{self.config.prompt}\n\n{messages[0]['content']}"}
            return [joined, *messages[1:]]
        return [{"role": "system", "content": self.config.prompt}, *messages]


@dataclass(frozen=True)
class Segment:
    """A confidence segment that was generated by a request of its own."""

    ids: tuple[int, ...]  # of prompt and segment, to resume from
    confidence: float | None
    rest: str  # text of the answer in the token that closes the tag
    tokens: int
    ended: bool  # whether the whole response ended with it


@dataclass(frozen=True)
class Router:
    """Answers one request by the tiers of a configuration: fills the trace and writes to the sink.

    Attributes:
        threshold: the confidence from which each tier but the last answers; None: the configuration's.
    """

    config: ServingConfig
    tiers: Sequence[Tier]
    request: ChatRequest
    threshold: float | None
    trace: Trace
    sink: ClientSink

    async def answer(self) -> None:
        """Raise BackendError if no tier that the policy allows gave a whole answer."""
        caps, trace = self.config.caps, self.trace
        budget = Budget(min(caps.escalations, len(self.tiers) - 1), caps.tokens, caps.exhausted)
        for index, tier in enumerate(self.tiers):
            last = index + 1 == len(self.tiers)
            rule = tier.policy.rule
            if self.threshold is not None and rule is not None and not last:
                rule = answer_from(self.threshold, rule.invalid if rule.invalid != "answer" else "escalate")
            budget = replace(budget, tokens=self.tokens_left())
            try:
                decision = await self._ask(tier, rule, budget)
            except BackendError as error:
                # A backend's own message may quote the prompt.
                message = "it rejected the request" if error.kind == "rejected" else str(error)
                where = f"{tier.backend.name} at {tier.backend.config.url}"
                _LOG.warning("backend %s failed, %s: %s; request %s", where, error.kind, message, trace.id)
                trace.steps.append({"tier": tier.name, "failed": error.kind})
                last = last or budget.escalations < 1 or self.tokens_left() == 0
                if last or self.config.on_error == "fail" or not self.sink.take_back():
                    raise
                decision = Decision("escalate", f"{tier.name} failed: {error.kind}")
            if decision.action == "answer":
                return
            if decision.action == "refuse":
                await self.sink.write(self.config.refusal)
                trace.finish_reason = "stop"
                return
            budget = budget.spend_escalation()

    def tokens_left(self) -> int | None:
        cap = self.config.caps.tokens
        return None if cap is None else max(0, cap - sum(self.trace.tokens.values()))

    async def _ask(self, tier: Tier, rule: ThresholdRule | None, budget: Budget) -> Decision:
        """Ask one tier; after the decision ``answer`` the answer has been given."""
        trace = self.trace
        trace.stated = trace.confidence = trace.tokens_to_confidence = trace.basis = None
        if rule is None:
            spent = budget.tokens == 0
            answer, refuse = "the tier states no confidence", "the request's tokens are spent"
            decision = Decision("refuse", refuse) if spent else Decision("answer", answer)
            trace.add_decision(tier.name, decision)
            return decision if spent else await self._stream(tier, None, budget)
        if tier.config.style == "stop_and_resume" or tier.config.confidence.source == "mean":
            return await self._stop_and_resume(tier, rule, budget)
        return await self._stream(tier, rule, budget)

    async def _stream(self, tier: Tier, rule: ThresholdRule | None, budget: Budget) -> Decision:
        """Ask by one streamed request, which is aborted at the closing tag if its answer is not wanted."""
        trace, limit = self.trace, tier.config.max_confidence_tokens
        reader = None if rule is None else ConfidenceReader()
        output, seen, counted = self._output(tier), 0, None
        before = trace.tokens.get(tier.name, 0)
        async with tier.backend.stream(self._whole_response(tier, budget)) as blocks:
            async for block in blocks:
                for chunk in block:
                    counted = self._count(tier, chunk) or counted
                    text, tokens = chunk.text, chunk.tokens
                    if reader is not None:
                        seen += tokens
                        text = reader.feed(text)
                        if reader.state == "reading" and (chunk.finish_reason or seen > limit):
                            text += reader.finish()
                        if reader.state == "reading":
                            continue
                        trace.tokens_to_confidence = seen if reader.state == "valid" else None
                        # The tokens of the chunk that closes the tag count as the confidence's.
                        tokens = 0 if reader.state == "valid" else tokens
                        confidence, reader = reader.confidence, None
                        assert rule is not None
                        decision = self._decide(tier, rule, confidence, budget)
                        if decision.action != "answer":
                            return decision
                    output.feed(text, tokens, chunk.finish_reason)
                if reader is None:
                    await output.send()
                if output.has_ended() and not blocks.finished:
                    break
        if reader is not None:
            raise BackendError("cut", f"backend {tier.backend.name} ended before a confidence could be read")
        if counted is not None and not output.cut:
            # Chunks were counted so far; one may hold several tokens.
            trace.tokens[tier.name] = before + counted
            output.tokens = max(0, counted - (trace.tokens_to_confidence or 0))
        return await self._close(output)

    async def _stop_and_resume(self, tier: Tier, rule: ThresholdRule, budget: Budget) -> Decision:
        """Stop at the closing tag of one or several samples, decide, and resume from one of them."""
        trace, wanted, left = self.trace, tier.config.confidence.samples, self.tokens_left()
        each = least(tier.config.max_confidence_tokens, None if left is None else max(1, left // wanted))
        segments = await gather(*(self._open(tier, sample, each) for sample in range(wanted)))
        trace.tokens_to_confidence = sum(segment.tokens for segment in segments)
        confidences = [segment.confidence for segment in segments]
        stated = mean_confidence(confidences) if wanted > 1 else confidences[0]
        chosen = min(segments, key=lambda o: math.inf if o.confidence is None else abs(o.confidence - (stated or 0.0)))
        decision = self._decide(tier, rule, stated, replace(budget, tokens=self.tokens_left()))
        if decision.action != "answer":
            return decision
        output = self._output(tier)
        output.feed(chosen.rest, 0, "stop" if chosen.ended else None)
        await output.send()
        if not output.has_ended():
            limit = least(self._limit(tier), self.tokens_left())
            resumed = Generate(prompt_ids=chosen.ids, max_tokens=limit, sampling=tier.sampling(self.request))
            async with tier.backend.stream(resumed) as blocks:
                async for block in blocks:
                    for chunk in block:
                        trace.add_tokens(tier.name, chunk.tokens)
                        output.feed(chunk.text, chunk.tokens, chunk.finish_reason)
                    await output.send()
                    if output.has_ended() and not blocks.finished:
                        break
        return await self._close(output)

    async def _open(self, tier: Tier, sample: int, max_tokens: int | None) -> Segment:
        generate = Generate(
            messages=tier.messages([message.as_dict() for message in self.request.messages]),
            max_tokens=max_tokens,
            stops=(CLOSE_TAG,),
            include_stop=True,
            log_probs=True,  # which name the bytes of each token
            sampling=tier.sampling(self.request, sample),
        )
        chunks: list[Chunk] = []
        async with tier.backend.stream(generate) as blocks:
            async for block in blocks:
                for chunk in block:
                    self._count(tier, chunk)
                    chunks.append(chunk)
        prompt_ids = next((chunk.prompt_ids for chunk in chunks if chunk.prompt_ids), None)
        ids = [id_ for chunk in chunks for id_ in chunk.token_ids or ()]
        token_bytes = [token for chunk in chunks for token in chunk.token_bytes]
        if prompt_ids is None or not ids or len(token_bytes) != len(ids):
            raise BackendError("garbage", f"backend {tier.backend.name} names no token ids to resume from")
        # An engine cuts its text at the tag; the token that closed the tag may hold the beginning of the answer.
        text = "".join(chunk.text for chunk in chunks)
        stopped = CLOSE_TAG in text
        reader = ConfidenceReader()
        rest = reader.feed(b"".join(token_bytes).decode("utf-8", "replace") if stopped else text) + reader.finish()
        ended = not stopped and any(chunk.finish_reason == "stop" for chunk in chunks)
        return Segment((*prompt_ids, *ids), reader.confidence, rest, len(ids), ended)

    def _count(self, tier: Tier, chunk: Chunk) -> int | None:
        """Count a chunk's tokens; returns the engine's own count for the whole response, once it is known."""
        self.trace.add_tokens(tier.name, chunk.tokens)
        if chunk.usage is None:
            return None
        self.trace.prompt_tokens = chunk.usage[0] or self.trace.prompt_tokens
        return chunk.usage[1]

    def _whole_response(self, tier: Tier, budget: Budget) -> Generate:
        allowance = tier.config.max_confidence_tokens if tier.config.states_confidence else 0
        limit = self._limit(tier)
        limit = None if limit is None else limit + allowance
        messages = tier.messages([message.as_dict() for message in self.request.messages])
        return Generate(messages=messages, max_tokens=least(budget.tokens, limit), sampling=tier.sampling(self.request))

    def _limit(self, tier: Tier) -> int | None:
        """Most tokens of an answer by the client and by the tier's calibration or certificate; None: the engine's."""
        return least(self.request.limit, (tier.pinned_sampling() or {}).get("max_tokens"))

    def _decide(self, tier: Tier, rule: ThresholdRule, stated: float | None, budget: Budget) -> Decision:
        trace = self.trace
        trace.stated = stated
        trace.confidence = None if stated is None else tier.policy.recalibrate(stated, trace.domain)
        decision = decide(trace.confidence, rule, budget)
        trace.basis = None if stated is None else "exhausted" if decision.exhausted else "confidence"
        trace.add_decision(tier.name, decision)
        return decision

    def _output(self, tier: Tier) -> OutputStream:
        limit = self.request.limit if tier.backend.config.dialect == "vllm" else None
        return OutputStream(self.sink.write, self.request.stops, limit)

    async def _close(self, output: OutputStream) -> Decision:
        await output.close()
        self.trace.answer_tokens, self.trace.finish_reason = output.tokens, output.finish_reason
        if output.cut or (output.finish_reason == "length" and self.request.limit is not None):
            self.trace.basis = None
        return Decision("answer", "answered")


def least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
