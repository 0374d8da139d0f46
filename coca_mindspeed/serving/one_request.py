"""A tier asked by one streamed request, which is left as soon as its answer is not wanted."""

from dataclasses import replace

from coca_mindspeed.serving.decision import Budget, Decision
from coca_mindspeed.serving.reader import ConfidenceReader
from coca_mindspeed.serving.request import RoutedRequest
from coca_mindspeed.serving.tier import Messages, Tier


async def read(request: RoutedRequest, tier: Tier, messages: Messages, budget: Budget) -> Decision:
    """Read, decide at the closing tag, and give the answer; or return what is to be done instead."""
    config, trace = tier.config, request.trace
    reader = ConfidenceReader() if config.states_confidence else None
    flow = request.flow(tier)
    seen = 0
    async with tier.backend.stream(request.generate(tier, messages, budget)) as blocks:
        async for block in blocks:
            for piece in block:
                trace.generated(tier.name, piece.tokens, config.price)
                trace.prompt_tokens = piece.prompt_tokens or trace.prompt_tokens
                text, log_probs, tokens = piece.text, piece.log_probs, piece.tokens
                if reader is not None:
                    seen += tokens
                    text = reader.feed(text)
                    if reader.state == "reading" and (piece.finish_reason or seen > config.max_confidence_tokens):
                        text += reader.finish()
                    if reader.state == "reading":
                        continue
                    valid = reader.state == "valid"
                    trace.tokens_to_confidence = seen if valid else None
                    decision = request.decide(tier, reader.confidence, budget)
                    reader = None
                    if decision.action != "answer":
                        return decision
                    if valid:  # what came with the closing tag is the confidence's and not counted as the answer's
                        log_probs, tokens = (), 0
                flow.feed(text, log_probs, tokens)
                flow.finish_reason = flow.finish_reason or piece.finish_reason
            if reader is None:
                await flow.send()
            if flow.is_full() and not blocks.finished:
                break
    return await request.close(tier, flow, budget)


async def probe(request: RoutedRequest, tier: Tier) -> Decision:
    """What the tier would have said, and nothing more of it."""
    reader = ConfidenceReader()
    budget, limit = request.whole_budget(), tier.config.max_confidence_tokens
    generate = replace(request.generate(tier, request.messages, budget), max_tokens=limit)
    async with tier.backend.stream(generate) as blocks:
        async for block in blocks:
            for piece in block:
                if reader.state == "reading":
                    request.trace.generated(tier.name, piece.tokens, tier.config.price)
                    reader.feed(piece.text)
            if reader.state != "reading":
                break
    reader.finish()
    return request.decide(tier, reader.confidence, budget)
