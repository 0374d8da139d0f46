"""A tier asked by two requests: stop at the closing tag, then go on by the token ids; never by text tokenised again."""

import math
from dataclasses import dataclass, replace
from functools import partial

from coca_mindspeed.algorithm.response import CLOSE_TAG
from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.backends import Generate
from coca_mindspeed.serving.confidence import expected_confidence, mean_confidence
from coca_mindspeed.serving.decision import Budget, Decision
from coca_mindspeed.serving.pieces import TokenLogProbs
from coca_mindspeed.serving.reader import ConfidenceReader
from coca_mindspeed.serving.request import RoutedRequest, least
from coca_mindspeed.serving.side_by_side import side_by_side, succeeded
from coca_mindspeed.serving.tier import Messages, Tier


@dataclass(frozen=True)
class _Opening:
    """A confidence segment of its own request.

    Attributes:
        ids: prompt and segment, to go on from.
        confidence: as it was stated.
        expected: by the log-probs of its digits.
        rest: what the closing token holds of the answer.
        tokens: of the segment.
        ended: whether the whole response has ended with it.
    """

    ids: tuple[int, ...]
    confidence: float | None
    expected: float | None
    rest: str
    tokens: int
    ended: bool


async def stop_and_go_on(request: RoutedRequest, tier: Tier, messages: Messages, budget: Budget) -> Decision:
    """Stop at the tag, once or several times side by side, decide, and go on from one of the openings."""
    config, trace = tier.config, request.trace
    wanted, left = min(config.confidence.samples, 1 + budget.samples), request.tokens_left()
    each = least(config.max_confidence_tokens, None if left is None else max(1, left // wanted))
    openings = succeeded(await side_by_side(*(partial(_open, request, tier, messages, i, each) for i in range(wanted))))
    trace.tokens_to_confidence = sum(opening.tokens for opening in openings)
    stated = openings[0].confidence
    if config.confidence.source == "mean":
        stated = mean_confidence([opening.confidence for opening in openings])
    elif config.confidence.source == "log_probs":
        stated = openings[0].expected
    chosen = min(openings, key=lambda o: math.inf if o.confidence is None else abs(o.confidence - (stated or 0.0)))
    decision = request.decide(tier, stated, replace(budget, tokens=request.tokens_left()))
    if decision.action != "answer":
        return decision
    flow = request.flow(tier)
    flow.feed(chosen.rest, (), 0)
    await flow.send()
    if chosen.ended:
        flow.finish_reason = "stop"
    elif not flow.is_full():
        limit = least(request.ask.max_tokens, request.tokens_left())
        if limit is None:  # a completion without a limit ends after 16 tokens, unlike a chat's
            limit = await tier.backend.context_tokens() - len(chosen.ids)
        going_on = replace(request.go_on(tier), prompt_ids=chosen.ids, max_tokens=max(1, limit))
        async with tier.backend.stream(going_on) as blocks:
            async for block in blocks:
                for piece in block:
                    trace.generated(tier.name, piece.tokens, config.price)
                    flow.feed(piece.text, piece.log_probs, piece.tokens)
                    flow.finish_reason = flow.finish_reason or piece.finish_reason
                await flow.send()
                if flow.is_full() and not blocks.finished:
                    break
    return await request.close(tier, flow, budget)


async def _open(
    request: RoutedRequest, tier: Tier, messages: Messages, number: int, max_tokens: int | None
) -> _Opening:
    """Generate up to the closing tag."""
    config, trace = tier.config, request.trace
    others = dict(request.ask.others)
    if "seed" in others:
        others["seed"] += number  # equal seeds would state one confidence several times
    generate = Generate(
        messages=tier.messages(messages),
        max_tokens=max_tokens,
        temperature=request.temperature(tier),
        stops=(CLOSE_TAG,),
        include_stop=True,
        log_probs=config.confidence.alternatives if config.confidence.source == "log_probs" else 0,
        token_ids=True,
        others=others,
    )
    prompt_ids: tuple[int, ...] | None = None
    ids: list[int] = []
    log_probs: list[TokenLogProbs] = []
    text, finish_reason = "", None
    async with tier.backend.stream(generate) as blocks:
        async for block in blocks:
            for piece in block:
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
