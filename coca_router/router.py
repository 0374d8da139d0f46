"""Answer a request: ask a tier, decide on its confidence, and escalate to the next tier."""

import asyncio
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from coca_router.backends import Backend, BackendError, Chunk
from coca_router.config import BY_CLIENT, ServingConfig, TierConfig, TierPolicy
from coca_router.decision import Budget, Decision, ThresholdRule, answer_from, decide
from coca_router.http_server import AnswerWriter
from coca_router.openai_api import NEUTRAL_SAMPLING, ApiError, ChatRequest
from coca_router.output_stream import ConfidenceReader, OutputStream, ThoughtSplitter
from coca_router.prompts import ServedPrompt
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
        if request.reasoning_effort is not None and self.passes_effort:
            values["reasoning_effort"] = request.reasoning_effort
        if request.seed is not None:
            values["seed"] = request.seed ^ sample  # stays within 64 bits
        return values

    @property
    def prompt(self) -> ServedPrompt:
        return self.policy.prompt

    def reader(self) -> ConfidenceReader:
        return ConfidenceReader(self.prompt.form.decimals, self.prompt.form.thinking)

    @property
    def passes_effort(self) -> bool:
        """Whether a client's ``reasoning_effort`` goes to the backend."""
        return self.backend.config.request.get("reasoning_effort") == BY_CLIENT

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
        systems = [message.as_dict() for message in request.messages if message.role in ("system", "developer")]
        if any(message["content"] != self.prompt.form.system_prompt for message in systems[:1]) or systems[1:]:
            wrong["messages"] = "its own system prompt; send none"
        if threshold is not None and self.policy.risk is not None:
            wrong["model"] = f"its own threshold; use the model {request.model.partition('@')[0]!r}"
        for name, allowed in wrong.items():
            done = "calibrated" if self.policy.risk is None else "certified"
            message = f"{name}: tier {self.name} is {done} with {allowed}"
            raise ApiError(400, message, param=name, code="pinned_parameter")


@dataclass(frozen=True)
class Router:
    """Answers one request by the tiers of a configuration: fills the trace and writes the answer."""

    config: ServingConfig
    tiers: Sequence[Tier]
    request: ChatRequest
    threshold: float | None  # the confidence from which each tier but the last answers; None: the configuration's
    trace: Trace
    writer: AnswerWriter
    category: str | None = None  # that the request names

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
        trace.tokens_to_confidence = trace.basis = trace.prompt_tokens = trace.thought_tokens = None
        trace.decides = rule is not None and budget.tokens != 0
        trace.form = tier.prompt.digest(self.request, self.category)
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
        asked = tier.prompt.messages(self.request, self.category), limit, tier.sampling(self.request, sample)
        reader, seen = tier.reader(), 0
        async with tier.backend.stream(*asked) as chunks:
            async for chunk in chunks:
                self.trace.tokens[tier.name] += chunk.tokens
                seen += chunk.tokens
                reader.feed(chunk.thought + chunk.text)
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
        answer = TierAnswer(self, tier, rule, budget, others)
        async with tier.backend.stream(*answer.asked()) as chunks:
            async for chunk in chunks:
                if (decision := await answer.feed(chunk)) is not None:
                    return decision
                if answer.state == "ended" and not chunks.finished:  # by a limit of the client
                    break
        return await answer.close()


@dataclass
class _TokenCounts:
    """Tokens of one tier's answer."""

    read: int = 0  # until the confidence was known, by our count
    confidence: int = 0  # of the stated confidence, if it is valid
    thought: int = 0  # between a confidence and its answer
    others: int = 0  # of the further confidences of a mean
    by_engine: int = 0  # of the whole response, by the engine's count; 0: unknown


class TierAnswer:
    """One tier's answer: a state machine that is fed with chunks, decides on the confidence, and gives the text.

    Attributes:
        state: ``reading`` while the text may become a confidence; ``stated`` until the decision on it; ``answering``;
            ``ended`` by the engine or by a limit of the client. A plain model's answer begins with ``answering``.
    """

    def __init__(
        self,
        router: Router,
        tier: Tier,
        rule: ThresholdRule | None,
        budget: Budget,
        others: Sequence[asyncio.Task[tuple[float | None, int]]],
    ) -> None:
        request, writer, self._category = router.request, router.writer, router.category
        self._request, self._trace, self._writer = request, router.trace, writer
        self._tier, self._rule, self._budget, self._others = tier, rule, budget, others
        self._reader, self._tokens = tier.reader(), _TokenCounts()
        self._thought = ThoughtSplitter() if tier.prompt.form.thinking else None
        # The log-probs are known after the answer, which is held back until then.
        self._by_log_prob = tier.config.confidence.source == "answer_logprob"
        self._log_probs: list[float] = []
        self._held: list[str] = []
        self._held_thought: list[str] = []
        ours = tier.backend.config.dialect == "vllm" or self._thought is not None  # the engine's limit covers a thought
        client_limit = request.limit if ours else None
        self._output = OutputStream(self._hold if self._by_log_prob else writer.write, request.stops, client_limit)
        states_confidence = tier.config.states_confidence
        self.state: Literal["reading", "stated", "answering", "ended"] = "reading" if states_confidence else "answering"

    async def _hold(self, text: str) -> None:
        self._held.append(text)

    def asked(self) -> tuple[list[Mapping[str, Any]], int | None, dict[str, Any]]:
        """Messages, token limit and parameters for the backend."""
        tier, request = self._tier, self._request
        clients, pinned = request.limit, tier.pinned_sampling().get("max_tokens")
        if clients is not None and self._thought is not None:
            clients += tier.config.max_thought_tokens
        limit = least(clients, pinned)
        if limit is not None and tier.config.states_confidence:
            limit += tier.config.max_confidence_tokens
        sampling = tier.sampling(request) | ({"logprobs": True} if self._by_log_prob else {})
        messages = tier.prompt.messages(request, self._category)
        return messages, least(self._budget.tokens, limit), sampling | (request.passed() or {})

    async def feed(self, chunk: Chunk) -> Decision | None:
        """Take a chunk; return a decision if the answer is not wanted."""
        self._trace.tokens[self._tier.name] += chunk.tokens
        if chunk.usage is not None:  # so far, or of the whole answer
            self._trace.prompt_tokens, self._tokens.by_engine = chunk.usage
        if self.state != "ended":
            self._log_probs += chunk.log_probs
        thought, text, tokens = chunk.thought, chunk.text, chunk.tokens
        if self.state == "reading":
            thought, text, tokens = self._read_confidence(chunk)
        if self.state == "reading":
            return None
        if self.state == "stated":
            decision = await self._decide_on_stated()
            if decision is not None and decision.action != "answer":
                return decision
            self.state = "answering"
        if chunk.tool_calls:
            await self._writer.write_calls(chunk.tool_calls)
        if self._thought is not None and self._thought.is_open:
            thought, text, tokens = self._end_thought(self._thought, thought, text, tokens, chunk)
        elif self._tier.config.states_confidence and self._thought is None:
            # A reasoning parser takes the whole answer of a model that was trained without thinking for a thought.
            thought, text = "", thought + text
            self._tier.backend.note_thought(bool(chunk.thought))
        if self._by_log_prob:
            self._held_thought.append(thought)
        else:
            await self._writer.write_thought(thought)
        await self._output.feed(text, tokens, chunk.finish_reason)
        if self._output.finish_reason:
            self.state = "ended"
        return None

    def _end_thought(
        self, splitter: ThoughtSplitter, thought: str, text: str, tokens: int, chunk: Chunk
    ) -> tuple[str, str, int]:
        """The parts of thought and answer, and the answer's tokens, in a chunk that begins inside the thought."""
        is_answer = splitter.has_field and not thought and bool(text)
        thought, text = splitter.feed(thought, text)
        if chunk.finish_reason is not None:
            thought += splitter.finish()
        if not splitter.is_open:
            self._output.begin_after_confidence()
        if is_answer:
            self._log_probs = list(chunk.log_probs)
            return thought, text, tokens
        # The tokens of the chunk with the closing tag count as the thought's.
        self._tokens.thought, self._log_probs = self._tokens.thought + tokens, []
        return thought, text, 0

    def _read_confidence(self, chunk: Chunk) -> tuple[str, str, int]:
        """Read a chunk; once the confidence is stated, return the text behind it, by its fields, and its tokens."""
        self._tokens.read += chunk.tokens
        thought = self._reader.feed(chunk.thought)
        text = self._reader.feed(chunk.text)
        too_long = self._tokens.read > self._tier.config.max_confidence_tokens
        if self._reader.state == "reading" and (chunk.finish_reason or too_long):
            text += self._reader.finish()
        if self._reader.state == "reading":
            return "", "", 0
        self.state = "stated"
        if self._reader.state == "invalid":
            return thought, text, chunk.tokens
        # The tokens of the chunk that closes the tag count as the confidence's.
        self._tokens.confidence, self._log_probs = self._tokens.read, []
        self._output.begin_after_confidence()
        return thought, text, 0

    async def _decide_on_stated(self) -> Decision | None:
        """Decide on the stated confidence; None if the answer's log-probs decide."""
        further = await asyncio.gather(*self._others)
        confidence = mean_confidence([self._reader.confidence, *(stated for stated, _ in further)])
        self._tokens.others = sum(count for _, count in further)
        known = self._tokens.confidence + self._tokens.others
        self._trace.tokens_to_confidence = None if confidence is None else known
        self._trace.stated_confidence = confidence
        return None if self._by_log_prob else self._decide(confidence)

    async def close(self) -> Decision:
        """End the answer after its last chunk. Raises BackendError if it is not whole."""
        tier, trace, output, tokens = self._tier, self._trace, self._output, self._tokens
        if self.state == "reading":
            raise BackendError("cut", f"backend {tier.backend.name} ended before a confidence could be read")
        if tokens.by_engine and not output.cut:
            # Chunks were counted so far; one may hold several tokens.
            trace.tokens[tier.name] = tokens.others + tokens.by_engine
            output.tokens = max(0, tokens.by_engine - tokens.confidence - tokens.thought)
        await output.close()
        if self._by_log_prob:
            decision = await self._decide_by_log_prob()
            if decision.action != "answer":
                return decision
        trace.answer_tokens, trace.finish_reason = output.tokens, output.finish_reason
        trace.thought_tokens = None if self._thought is None else tokens.thought
        if output.cut or (output.finish_reason == "length" and self._request.limit is not None):
            trace.basis = None
        return Decision("answer", "answered")

    async def _decide_by_log_prob(self) -> Decision:
        """Decide by the log-probs of the answer, and give the text that was held back if it is wanted."""
        text = "".join(self._held)
        if text and not self._log_probs:
            name = self._tier.backend.name
            raise BackendError("failed", f"backend {name} names no log-probs; check its model and url")
        # Rounding may put a mean log-prob above 0.
        mean = math.exp(min(statistics.fmean(self._log_probs), 0.0)) if self._log_probs else math.nan
        self._trace.answer_probability = None if math.isnan(mean) else mean
        decision = self._decide(self._trace.answer_probability)
        if decision.action == "answer":
            await self._writer.write_thought("".join(self._held_thought))
            await self._writer.write(text)
        return decision

    def _decide(self, confidence: float | None) -> Decision:
        """Decide by a confidence, recalibrated where the tier has a map, and note it in the trace."""
        assert self._rule is not None
        tier, trace = self._tier, self._trace
        trace.confidence = None if confidence is None else tier.policy.recalibrate(confidence)
        decision = decide(trace.confidence, self._rule, self._budget)
        if confidence is not None:
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
