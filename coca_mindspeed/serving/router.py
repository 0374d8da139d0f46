"""Answer a request: ask a tier, decide on its confidence, and escalate to the next tier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from coca_mindspeed.algorithm.parsing import CLOSE_TAG
from coca_mindspeed.serving.backends import Backend, Generate, gather
from coca_mindspeed.serving.chunks import BackendError, Chunk
from coca_mindspeed.serving.confidence import ConfidenceReader, mean_confidence
from coca_mindspeed.serving.config import ServingConfig, TierConfig, TierPolicy
from coca_mindspeed.serving.decision import Budget, Decision, ThresholdRule, answer_from, decide
from coca_mindspeed.serving.openai_api import NEUTRAL_SAMPLING, ApiError, ChatRequest
from coca_mindspeed.serving.output_stream import OutputStream
from coca_mindspeed.serving.trace import Trace

Messages = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """Receives an answer."""

    async def begin(self, trace: Trace, text: str) -> None:
        """Begin an answer or refusal with ``text``; tier, action and confidence are known."""
        ...

    async def text(self, text: str) -> None:
        """Add text."""
        ...

    def take_back(self) -> bool:
        """Forget the text; False where the client has seen some of it."""
        ...


@dataclass(frozen=True)
class Tier:
    """A tier with its backend.

    Attributes:
        config: its section of the file.
        backend: its server.
        policy: its rule and pinned sampling.
    """

    config: TierConfig
    backend: Backend
    policy: TierPolicy

    @property
    def name(self) -> str:
        return self.config.name

    def pinned_sampling(self) -> dict[str, Any] | None:
        """The sampling parameters for which the tier is calibrated or certified; None: it is for none."""
        pinned = self.policy.pinned
        if pinned is None:
            return None
        return {"temperature": pinned.temperature, **NEUTRAL_SAMPLING, **pinned.sampling}

    def sampling(self, request: ChatRequest, sample: int = 0) -> dict[str, Any]:
        """The sampling parameters for the engine; further samples get further seeds."""
        values = self.pinned_sampling() or request.sampling()
        if self.policy.pinned is not None and self.backend.config.dialect == "openai":
            for name in ("top_k", "min_p", "repetition_penalty"):  # unknown to OpenAI's own servers
                if values[name] == NEUTRAL_SAMPLING[name]:
                    del values[name]
        if self.policy.pinned is None and self.config.temperature is not None:
            values["temperature"] = self.config.temperature
        if not values.get("logit_bias"):
            values.pop("logit_bias", None)
        values.pop("max_tokens", None)
        if request.seed is not None:
            values["seed"] = request.seed + sample
        return values

    def check(self, request: ChatRequest, threshold: float | None) -> None:
        """Refuse a request for which the tier's calibration or certificate does not hold.

        Raises:
            ApiError: 400 with the parameter's name.
        """
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
            wrong["model"] = "its own threshold"
        for name, allowed in wrong.items():
            done = "calibrated" if self.policy.risk is None else "certified"
            message = f"{name}: tier {self.name} is {done} with {allowed}; leave {name} as it is"
            raise ApiError(400, message, param=name, code="pinned_parameter")

    def messages(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The client's messages; the tier's prompt stands before their system message."""
        if not self.config.states_confidence:
            return list(messages)
        if messages[0]["role"] == "system":
            joined = {**messages[0], "content": f"{self.config.prompt}\n\n{messages[0]['content']}"}
            return [joined, *messages[1:]]
        return [{"role": "system", "content": self.config.prompt}, *messages]


@dataclass(frozen=True)
class Opening:
    """A confidence segment that a request of its own generated.

    Attributes:
        ids: of prompt and segment, to resume from.
        confidence: as stated.
        rest: text of the answer in the token that closes the tag.
        tokens: of the segment.
        ended: whether the whole response has ended with it.
    """

    ids: tuple[int, ...]
    confidence: float | None
    rest: str
    tokens: int
    ended: bool


class Router:
    """Answers requests by the tiers of a configuration."""

    def __init__(self, config: ServingConfig, tiers: Sequence[Tier]) -> None:
        self._config, self._tiers = config, tiers

    def check(self, request: ChatRequest, threshold: float | None) -> None:
        """Refuse a request for which a tier's calibration or certificate does not hold.

        Raises:
            ApiError: 400 with the parameter's name.
        """
        for tier in self._tiers:
            tier.check(request, threshold)

    async def answer(self, request: ChatRequest, threshold: float | None, trace: Trace, sink: Sink) -> None:
        """Answer, and fill the trace.

        Args:
            request: checked.
            threshold: from which on each tier but the last answers; None: as the configuration says.
            trace: filled.
            sink: receives the answer.

        Raises:
            BackendError: no tier that the policy allows gave a whole answer.
        """
        caps = self._config.caps
        routed = _Routed(self._config, request, trace, sink)
        budget = Budget(min(caps.escalations, len(self._tiers) - 1), caps.tokens, caps.exhausted)
        for index, tier in enumerate(self._tiers):
            last = index + 1 == len(self._tiers)
            rule = tier.policy.rule
            if threshold is not None and rule is not None and not last:
                rule = answer_from(threshold, rule.invalid if rule.invalid != "answer" else "escalate")
            budget = replace(budget, tokens=routed.tokens_left())
            try:
                decision = await routed.ask(tier, rule, budget)
            except BackendError as error:
                trace.steps.append({"tier": tier.name, "failed": error.kind})
                last = last or budget.escalations < 1 or routed.tokens_left() == 0
                if last or self._config.on_error == "fail" or not sink.take_back():
                    raise
                decision = Decision("escalate", f"{tier.name} failed: {error.kind}")
            if decision.action == "answer":
                return
            if decision.action == "refuse":
                await sink.begin(trace, self._config.refusal)
                trace.finish_reason = "stop"
                return
            budget = budget.spend(escalations=1)


@dataclass(frozen=True)
class _Routed:
    """A request on its way through the tiers."""

    config: ServingConfig
    request: ChatRequest
    trace: Trace
    sink: Sink

    def tokens_left(self) -> int | None:
        """Tokens that it may still generate; None: no cap."""
        cap = self.config.caps.tokens
        return None if cap is None else max(0, cap - sum(self.trace.tokens.values()))

    async def ask(self, tier: Tier, rule: ThresholdRule | None, budget: Budget) -> Decision:
        """Ask one tier; the decision ``answer`` says that the answer was given."""
        trace = self.trace
        trace.stated = trace.confidence = trace.tokens_to_confidence = trace.basis = None
        if rule is None:
            spent = budget.tokens == 0
            decision = Decision("answer", "the tier states no confidence")
            decision = Decision("refuse", "the request's tokens are spent") if spent else decision
            trace.decide(tier.name, decision)
            return decision if spent else await self._stream(tier, None, budget)
        if tier.config.style == "stop_and_resume" or tier.config.confidence.source == "mean":
            return await self._stop_and_resume(tier, rule, budget)
        return await self._stream(tier, rule, budget)

    async def _stream(self, tier: Tier, rule: ThresholdRule | None, budget: Budget) -> Decision:
        """Ask by one streamed request, which is left at the closing tag if its answer is not wanted."""
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
                if output.is_full() and not blocks.finished:
                    break
        if reader is not None:
            raise BackendError("cut", f"backend {tier.backend.name} ended before a confidence could be read")
        if counted is not None and not output.cut:
            # Chunks were counted so far; one may hold several tokens.
            trace.tokens[tier.name] = before + counted
            output.tokens = max(0, counted - (trace.tokens_to_confidence or 0))
        return await self._close(output)

    async def _stop_and_resume(self, tier: Tier, rule: ThresholdRule, budget: Budget) -> Decision:
        """Stop at the tag, once or several times at once, decide, and resume from one of the openings."""
        trace, wanted, left = self.trace, tier.config.confidence.samples, self.tokens_left()
        each = least(tier.config.max_confidence_tokens, None if left is None else max(1, left // wanted))
        openings = await gather(*(partial(self._open, tier, sample, each) for sample in range(wanted)))
        trace.tokens_to_confidence = sum(opening.tokens for opening in openings)
        confidences = [opening.confidence for opening in openings]
        stated = mean_confidence(confidences) if wanted > 1 else confidences[0]
        chosen = min(openings, key=lambda o: math.inf if o.confidence is None else abs(o.confidence - (stated or 0.0)))
        decision = self._decide(tier, rule, stated, replace(budget, tokens=self.tokens_left()))
        if decision.action != "answer":
            return decision
        output = self._output(tier)
        output.feed(chosen.rest, 0, "stop" if chosen.ended else None)
        await output.send()
        if not output.is_full():
            limit = least(self.request.limit, self.tokens_left())
            if limit is None:  # without a limit a completion ends after 16 tokens, unlike a chat's
                limit = await tier.backend.context_tokens() - len(chosen.ids)
            sampling = tier.sampling(self.request)
            resumed = Generate(prompt_ids=chosen.ids, max_tokens=max(1, limit), sampling=sampling)
            async with tier.backend.stream(resumed) as blocks:
                async for block in blocks:
                    for chunk in block:
                        trace.generated(tier.name, chunk.tokens)
                        output.feed(chunk.text, chunk.tokens, chunk.finish_reason)
                    await output.send()
                    if output.is_full() and not blocks.finished:
                        break
        return await self._close(output)

    async def _open(self, tier: Tier, sample: int, max_tokens: int | None) -> Opening:
        """Generate up to the closing tag."""
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
        return Opening((*prompt_ids, *ids), reader.confidence, rest, len(ids), ended)

    def _count(self, tier: Tier, chunk: Chunk) -> int | None:
        """Count a chunk's tokens; returns the engine's own count of all of the response's, once it is known."""
        self.trace.generated(tier.name, chunk.tokens)
        if chunk.usage is None:
            return None
        self.trace.prompt_tokens = chunk.usage[0] or self.trace.prompt_tokens
        return chunk.usage[1]

    def _whole_response(self, tier: Tier, budget: Budget) -> Generate:
        """The request for a whole response."""
        allowance = tier.config.max_confidence_tokens if tier.config.states_confidence else 0
        limit = least(self.request.limit, (tier.pinned_sampling() or {}).get("max_tokens"))
        limit = None if limit is None else limit + allowance
        messages = tier.messages([message.as_dict() for message in self.request.messages])
        return Generate(messages=messages, max_tokens=least(budget.tokens, limit), sampling=tier.sampling(self.request))

    def _decide(self, tier: Tier, rule: ThresholdRule, stated: float | None, budget: Budget) -> Decision:
        """Note a stated confidence and the decision on it."""
        trace = self.trace
        trace.stated = stated
        trace.confidence = None if stated is None else tier.policy.recalibrate(stated, trace.domain)
        decision = decide(trace.confidence, rule, budget)
        trace.basis = None if stated is None else "exhausted" if decision.exhausted else "confidence"
        trace.decide(tier.name, decision)
        return decision

    def _output(self, tier: Tier) -> OutputStream:
        """The stream of a tier's answer to the client."""
        exact = tier.backend.config.dialect == "vllm"
        begin, text = partial(self.sink.begin, self.trace), self.sink.text
        limit = self.request.limit if exact else None
        return OutputStream(begin, text, stops=self.request.stops, max_tokens=limit)

    async def _close(self, output: OutputStream) -> Decision:
        """Send the rest of the answer."""
        await output.close()
        self.trace.answer_tokens, self.trace.finish_reason = output.tokens, output.finish_reason
        if output.cut or (output.finish_reason == "length" and self.request.limit is not None):
            self.trace.basis = None
        return Decision("answer", "answered")


def least(*limits: int | None) -> int | None:
    """The smallest limit; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
