"""From a request to its answer: ask a tier, read its confidence, decide, and do what was decided."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import httpx

from coca_mindspeed.algorithm.response import CLOSE_TAG, CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.grading.mathematics.final_answer import final_answer
from coca_mindspeed.serving.answer_flow import AnswerFlow
from coca_mindspeed.serving.backends import Backend, BackendError, Generate, TokenLogProbs
from coca_mindspeed.serving.confidence import expected_confidence, mean_confidence
from coca_mindspeed.serving.decision import Budget, Decision, decide, decide_after
from coca_mindspeed.serving.openai_format import Ask
from coca_mindspeed.serving.reader import ConfidenceReader
from coca_mindspeed.serving.serving_config import HookConfig, ServingConfig, TierConfig, answer_gate
from coca_mindspeed.serving.trace import Trace

_ALTERNATIVES = 20  # the most that engines give to a token by default

Messages = Sequence[Mapping[str, Any]]
Recalibrate = Callable[[float, str | None], float]
T = TypeVar("T")


class Sink(Protocol):
    """Where an answer goes."""

    async def begin(self, trace: Trace) -> None:
        """An answer (or refusal) follows; tier, action and confidence are known."""
        ...

    async def text(self, text: str) -> None:
        """More of it."""
        ...

    def take_back(self) -> bool:
        """Forget what was given; False where the client has seen some of it."""
        ...


@dataclass(frozen=True)
class Tier:
    """A tier, ready to be asked.

    Attributes:
        index: from the cheapest.
        config: as the file has it.
        backend: its server.
        recalibrate: from a stated confidence (and a domain) to the one that is decided by.
    """

    index: int
    config: TierConfig
    backend: Backend
    recalibrate: Recalibrate

    @property
    def name(self) -> str:
        return self.config.name

    def messages(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The client's messages, the format's instructions before its own system message."""
        if not self.config.states_confidence:
            return list(messages)
        system = CONFIDENCE_FIRST_PROMPT if self.config.system_prompt is None else self.config.system_prompt
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{system}\n\n{messages[0]['content']}"}, *messages[1:]]
        return [{"role": "system", "content": system}, *messages]


@dataclass(frozen=True)
class _Opening:
    """A confidence segment of its own request: what it said, and the token ids to go on from."""

    ids: tuple[int, ...]
    confidence: float | None
    expected: float | None
    rest: str
    tokens: int
    ended: bool


class Router:
    """Answers requests by the tiers of a configuration."""

    def __init__(self, config: ServingConfig, tiers: Sequence[Tier], client: httpx.AsyncClient) -> None:
        self._config, self._tiers, self._client = config, tiers, client

    async def answer(self, ask: Ask, trace: Trace, sink: Sink) -> None:
        """Answer, and fill the trace.

        Raises:
            BackendError: no tier that the policy allows gave a whole answer.
        """
        assert ask.messages is not None
        shadow = self._config.shadow
        if shadow is None:
            await self._climb(ask, trace, sink)
            return
        served = next(tier for tier in self._tiers if tier.name == shadow.serve)
        first = self._tiers[0]
        if served is first or not first.config.states_confidence:
            await self._ask(served, ask, ask.messages, self._budget(trace), trace, sink, shadow=True)
            return
        probe = Trace(trace.id, trace.domain)
        [answered, _] = await side_by_side(
            lambda: self._ask(served, ask, ask.messages or (), self._budget(trace), trace, sink, shadow=True),
            lambda: self._probe(first, ask, probe),
        )
        trace.shadow = probe.shadow or {"tier": first.name, "action": "none", "reason": "the probe failed"}
        for tier, tokens in probe.tokens.items():
            trace.generated(tier, tokens, first.config.price)
        if isinstance(answered, BackendError):
            raise answered

    def _budget(self, trace: Trace) -> Budget:
        caps = self._config.caps
        tokens = None if caps.tokens is None else max(0, caps.tokens - sum(trace.tokens.values()))
        return Budget(min(caps.escalations, len(self._tiers) - 1), caps.samples, caps.hooks, tokens, caps.exhausted)

    async def _climb(self, ask: Ask, trace: Trace, sink: Sink) -> None:
        """From tier to tier until one answers or refuses."""
        messages: Messages = ask.messages or ()
        budget, index = self._budget(trace), 0
        while True:
            tier = self._tiers[index]
            budget = replace(budget, tokens=self._budget(trace).tokens)
            try:
                decision = await self._ask(tier, ask, messages, budget, trace, sink)
                if decision.action == "hook":
                    messages = await self._hook(messages, trace)
                    budget = budget.spend(hooks=1)
                    continue
                if decision.action == "sample":
                    await self._vote(tier, ask, messages, decision.samples, budget, trace, sink)
                    return
            except BackendError as error:
                trace.steps.append({"tier": tier.name, "failed": error.kind})
                last = index + 1 == len(self._tiers) or budget.escalations < 1 or budget.tokens == 0
                if last or self._config.on_error == "fail" or not sink.take_back():
                    raise
                decision = Decision("escalate", f"{tier.name} failed: {error.kind}")
            if decision.action == "answer":
                return
            if decision.action == "refuse":
                await sink.begin(trace)
                await sink.text(self._config.refusal)
                trace.finish_reason = "stop"
                return
            budget = budget.spend(escalations=1)
            index += 1

    async def _ask(
        self, tier: Tier, ask: Ask, messages: Messages, budget: Budget, trace: Trace, sink: Sink, shadow: bool = False
    ) -> Decision:
        """Ask one tier; ``answer`` says that it was given."""
        config = tier.config
        if not config.states_confidence:
            trace.stated = trace.confidence = trace.tokens_to_confidence = None
            if budget.tokens == 0:
                decision = Decision("refuse", "the request's tokens are spent")
                trace.decide(tier.name, decision)
                return decision
            trace.decide(tier.name, Decision("answer", "the tier states no confidence"))
            return await self._read(tier, ask, messages, budget, trace, sink, shadow)
        if config.style == "two_requests" or config.confidence.source != "stated":
            return await self._stop_and_go_on(tier, ask, messages, budget, trace, sink, shadow)
        return await self._read(tier, ask, messages, budget, trace, sink, shadow)

    def _decide(self, tier: Tier, stated: float | None, budget: Budget, trace: Trace, shadow: bool) -> Decision:
        trace.stated = stated
        trace.confidence = None if stated is None else tier.recalibrate(stated, trace.domain)
        decision = decide(trace.confidence, self._config.rule(tier.index), budget)
        if shadow:
            trace.shadow = {"tier": tier.name, "action": decision.action, "reason": decision.reason}
            trace.shadow["confidence"] = trace.confidence
            decision = Decision("answer", "shadow mode")
        trace.decide(tier.name, decision)
        return decision

    def _generate(self, tier: Tier, ask: Ask, messages: Messages, budget: Budget) -> Generate:
        """The request of a whole response."""
        config = tier.config
        limits = [limit for limit in (budget.tokens,) if limit is not None]
        if ask.max_tokens is not None:
            limits.append(ask.max_tokens + (config.max_confidence_tokens if config.states_confidence else 0))
        gate = config.after_answer
        return Generate(
            messages=tier.messages(messages),
            max_tokens=min(limits) if limits else None,
            temperature=ask.temperature if config.temperature is None else config.temperature,
            log_probs=0 if gate is not None and gate.mean_log_prob is not None else None,
            others=ask.others,
        )

    async def _read(
        self, tier: Tier, ask: Ask, messages: Messages, budget: Budget, trace: Trace, sink: Sink, shadow: bool
    ) -> Decision:
        """One streamed request, left as soon as its answer is not wanted."""
        config = tier.config
        reader = ConfidenceReader() if config.states_confidence else None
        flow = self._flow(tier, ask, sink, trace)
        seen = 0
        async with tier.backend.stream(self._generate(tier, ask, messages, budget)) as pieces:
            async for piece in pieces:
                trace.generated(tier.name, piece.tokens, config.price)
                trace.prompt_tokens = piece.prompt_tokens or trace.prompt_tokens
                seen += piece.tokens
                text = piece.text
                if reader is not None:
                    text = reader.feed(text)
                    if reader.state == "reading" and (piece.finish_reason or seen > config.max_confidence_tokens):
                        text += reader.finish()
                    if reader.state == "reading":
                        continue
                    valid = reader.state == "valid"
                    trace.tokens_to_confidence = seen if valid else None
                    decision = self._decide(tier, reader.confidence, budget, trace, shadow)
                    reader = None
                    if decision.action != "answer":
                        return decision
                    await flow.open()
                    # What came with the closing tag is not counted as the answer's: its tokens are the confidence's.
                    await flow.feed(text, () if valid else piece.log_probs, 0 if valid else piece.tokens)
                else:
                    await flow.open()
                    await flow.feed(text, piece.log_probs, piece.tokens)
                if piece.finish_reason is not None:
                    flow.finish_reason = flow.finish_reason or piece.finish_reason
                if flow.is_full() and piece.finish_reason is None:
                    break
        return await self._close(tier, flow, budget, trace, sink)

    def _flow(self, tier: Tier, ask: Ask, sink: Sink, trace: Trace) -> AnswerFlow:
        exact = tier.backend.config.dialect == "vllm"
        return AnswerFlow(
            sink.text,
            lambda: sink.begin(trace),
            stops=ask.stops,
            max_tokens=ask.max_tokens if exact else None,
            held=tier.config.after_answer is not None,
        )

    async def _close(self, tier: Tier, flow: AnswerFlow, budget: Budget, trace: Trace, sink: Sink) -> Decision:
        """The answer has ended: give what is left of it, or not, where a second gate says so."""
        if tier.config.after_answer is not None:
            spent = replace(budget, tokens=self._budget(trace).tokens)
            decision = decide_after(
                answer_gate(tier.config.after_answer),
                spent,
                cut_off=flow.finish_reason == "length",
                mean_log_prob=flow.mean_log_prob,
            )
            trace.decide(tier.name, decision)
            if decision.action != "answer":
                return decision
        await flow.close()
        trace.answer_tokens, trace.finish_reason = flow.tokens, flow.finish_reason
        return Decision("answer", "answered")

    async def _stop_and_go_on(
        self, tier: Tier, ask: Ask, messages: Messages, budget: Budget, trace: Trace, sink: Sink, shadow: bool
    ) -> Decision:
        """Stop at the tag, once or several times side by side; go on by the token ids of one of the openings."""
        config = tier.config
        wanted = min(config.confidence.samples, 1 + budget.samples)
        asked = [partial(self._open, tier, ask, messages, i, trace) for i in range(wanted)]
        openings = succeeded(await side_by_side(*asked))
        trace.tokens_to_confidence = sum(opening.tokens for opening in openings)
        if config.confidence.source == "mean":
            stated = mean_confidence([opening.confidence for opening in openings])
        else:
            stated = openings[0].expected if config.confidence.source == "log_probs" else openings[0].confidence
        chosen = min(openings, key=lambda o: math.inf if o.confidence is None else abs(o.confidence - (stated or 0.0)))
        decision = self._decide(tier, stated, budget, trace, shadow)
        if decision.action != "answer":
            return decision
        flow = self._flow(tier, ask, sink, trace)
        await flow.open()
        await flow.feed(chosen.rest, (), 0)
        if chosen.ended:
            flow.finish_reason = "stop"
        elif not flow.is_full():
            left = self._budget(trace).tokens
            limits = [limit for limit in (ask.max_tokens, left) if limit is not None]
            gate = config.after_answer
            going_on = Generate(
                prompt_ids=chosen.ids,
                max_tokens=max(1, min(limits)) if limits else None,
                temperature=ask.temperature if config.temperature is None else config.temperature,
                log_probs=0 if gate is not None and gate.mean_log_prob is not None else None,
                others=ask.others,
            )
            async with tier.backend.stream(going_on) as pieces:
                async for piece in pieces:
                    trace.generated(tier.name, piece.tokens, config.price)
                    await flow.feed(piece.text, piece.log_probs, piece.tokens)
                    flow.finish_reason = flow.finish_reason or piece.finish_reason
                    if flow.is_full() and piece.finish_reason is None:
                        break
        return await self._close(tier, flow, budget, trace, sink)

    async def _open(self, tier: Tier, ask: Ask, messages: Messages, number: int, trace: Trace) -> _Opening:
        """Generate up to the closing tag."""
        config = tier.config
        others = dict(ask.others)
        if "seed" in others:
            others["seed"] += number  # equal seeds would state one confidence several times
        generate = Generate(
            messages=tier.messages(messages),
            max_tokens=config.max_confidence_tokens,
            temperature=ask.temperature if config.temperature is None else config.temperature,
            stops=(CLOSE_TAG,),
            include_stop=True,
            log_probs=_ALTERNATIVES if config.confidence.source == "log_probs" else 0,
            token_ids=True,
            others=others,
        )
        prompt_ids: tuple[int, ...] | None = None
        ids: list[int] = []
        log_probs: list[TokenLogProbs] = []
        text, finish_reason = "", None
        async with tier.backend.stream(generate) as pieces:
            async for piece in pieces:
                trace.generated(tier.name, piece.tokens, config.price)
                trace.prompt_tokens = piece.prompt_tokens or trace.prompt_tokens
                prompt_ids = prompt_ids or piece.prompt_ids
                ids += piece.token_ids or ()
                log_probs += piece.log_probs
                text += piece.text
                finish_reason = finish_reason or piece.finish_reason
        if prompt_ids is None or not ids or len(log_probs) != len(ids):
            raise BackendError(
                "garbage", f"backend {tier.backend.name} names no token ids and log-probs, by which to go on"
            )
        # An engine cuts its text at the tag; the token that closed the tag may hold the beginning of the answer.
        written = b"".join(token.token for token in log_probs).decode("utf-8", "replace")
        stopped = CLOSE_TAG in text
        reader = ConfidenceReader()
        rest = reader.feed(written if stopped else text) + reader.finish()
        expected = None if reader.confidence is None else expected_confidence(log_probs)
        ended = not stopped and finish_reason == "stop"
        return _Opening((*prompt_ids, *ids), reader.confidence, expected, rest, len(ids), ended)

    async def _probe(self, tier: Tier, ask: Ask, probe: Trace) -> Decision:
        """In shadow mode: what the first tier would have said, and nothing more of it."""
        reader = ConfidenceReader()
        budget = self._budget(probe)
        limit = tier.config.max_confidence_tokens
        generate = replace(self._generate(tier, ask, ask.messages or (), budget), max_tokens=limit)
        async with tier.backend.stream(generate) as pieces:
            async for piece in pieces:
                probe.generated(tier.name, piece.tokens, tier.config.price)
                reader.feed(piece.text)
                if reader.state != "reading":
                    break
        reader.finish()
        return self._decide(tier, reader.confidence, budget, probe, shadow=True)

    async def _vote(
        self, tier: Tier, ask: Ask, messages: Messages, samples: int, budget: Budget, trace: Trace, sink: Sink
    ) -> None:
        """Answer by the largest cluster of equal final answers; between equals the one that was asked first."""
        left = self._budget(trace).tokens
        share = budget if left is None else replace(budget, tokens=max(1, left // samples))
        asked = [partial(self._sample, tier, ask, messages, i, share, trace) for i in range(samples)]
        answers = succeeded(await side_by_side(*asked))
        finals = [final_answer(flow.given, boxed_only=True) or flow.given.strip() for flow in answers]
        winner, votes = Counter(finals).most_common(1)[0]
        flow = answers[finals.index(winner)]
        trace.reason += f"; {votes} of {len(finals)} agree"
        await sink.begin(trace)
        await sink.text(flow.given)
        trace.answer_tokens, trace.finish_reason = flow.tokens, flow.finish_reason

    async def _sample(
        self, tier: Tier, ask: Ask, messages: Messages, number: int, budget: Budget, trace: Trace
    ) -> AnswerFlow:
        """One whole answer, kept."""
        flow = AnswerFlow(stops=ask.stops, max_tokens=None)
        reader = ConfidenceReader()
        others = {**ask.others, **({"seed": ask.others["seed"] + number + 1} if "seed" in ask.others else {})}
        generate = replace(self._generate(tier, ask, messages, budget), others=others)
        async with tier.backend.stream(generate) as pieces:
            async for piece in pieces:
                trace.generated(tier.name, piece.tokens, tier.config.price)
                counted = 0 if reader.state == "reading" else piece.tokens
                text = reader.feed(piece.text) + (reader.finish() if piece.finish_reason else "")
                await flow.feed(text, piece.log_probs, counted)
                flow.finish_reason = flow.finish_reason or piece.finish_reason
                if flow.is_full() and piece.finish_reason is None:
                    break
        await flow.close()
        return flow

    async def _hook(self, messages: Messages, trace: Trace) -> Messages:
        """Put the hook's context before the last message's text."""
        hook = self._config.hook
        assert hook is not None
        context = await _call_hook(self._client, hook, messages, trace)
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{context}\n\n{last['content']}"}]


async def _call_hook(client: httpx.AsyncClient, hook: HookConfig, messages: Messages, trace: Trace) -> str:
    body = {"messages": list(messages), "confidence": trace.confidence, "tier": trace.tier}
    try:
        with anyio.fail_after(hook.timeout_s):
            response = await client.post(hook.url, json=body)
        context = response.json()["context"] if response.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise BackendError("failed", f"the hook failed: {type(error).__name__}") from error
    if not isinstance(context, str) or len(context) > hook.max_characters:
        raise BackendError("failed", f"the hook returned no context of at most {hook.max_characters} characters")
    return context


async def side_by_side(*calls: Callable[[], Awaitable[T]]) -> list[T | BackendError]:
    """The results of calls that run at once, or the error of each that failed."""
    results: dict[int, T | BackendError] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except BackendError as error:
            results[index] = error

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(run, index, call)
    return [results[index] for index in range(len(calls))]


def succeeded(results: Sequence[T | BackendError]) -> list[T]:
    """Those that did not fail.

    Raises:
        BackendError: all did; the first one's.
    """
    whole = [result for result in results if not isinstance(result, BackendError)]
    if not whole:
        raise next(result for result in results if isinstance(result, BackendError))
    return whole
