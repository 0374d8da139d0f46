"""Several answers of one tier, and a vote over them."""

from collections import Counter
from dataclasses import replace
from functools import partial

from coca_mindspeed.grading.mathematics.final_answer import final_answer
from coca_mindspeed.serving.answer_flow import AnswerFlow
from coca_mindspeed.serving.decision import Budget
from coca_mindspeed.serving.reader import ConfidenceReader
from coca_mindspeed.serving.request import RoutedRequest
from coca_mindspeed.serving.side_by_side import side_by_side, succeeded
from coca_mindspeed.serving.tier import Messages, Tier


async def vote(request: RoutedRequest, tier: Tier, messages: Messages, samples: int, budget: Budget) -> None:
    """Answer by the largest cluster of equal final answers; between equals the one that was asked first."""
    left = request.tokens_left()
    share = budget if left is None else replace(budget, tokens=max(1, left // samples))
    asked = (partial(_sample, request, tier, messages, number, share) for number in range(samples))
    answers = succeeded(await side_by_side(*asked))
    finals = [final_answer(flow.given, boxed_only=True) or flow.given.strip() for flow in answers]
    winner, votes = Counter(finals).most_common(1)[0]
    flow = answers[finals.index(winner)]
    trace = request.trace
    trace.reason += f"; {votes} of {len(finals)} agree"
    await request.sink.begin(trace, flow.given)
    trace.answer_tokens, trace.finish_reason = flow.tokens, flow.finish_reason


async def _sample(request: RoutedRequest, tier: Tier, messages: Messages, number: int, budget: Budget) -> AnswerFlow:
    """One whole answer, kept."""
    flow = AnswerFlow(stops=request.ask.stops, max_tokens=None)
    reader = ConfidenceReader()
    others = dict(request.ask.others)
    if "seed" in others:
        others["seed"] += number + 1
    generate = replace(request.generate(tier, messages, budget), others=others)
    async with tier.backend.stream(generate) as blocks:
        async for block in blocks:
            for piece in block:
                request.trace.generated(tier.name, piece.tokens, tier.config.price)
                counted = 0 if reader.state == "reading" else piece.tokens
                text = reader.feed(piece.text) + (reader.finish() if piece.finish_reason else "")
                flow.feed(text, piece.log_probs, counted)
                flow.finish_reason = flow.finish_reason or piece.finish_reason
            if flow.is_full() and not blocks.finished:
                break
    await flow.close()
    return flow
