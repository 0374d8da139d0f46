"""Several answers of one tier, and a vote over them."""

from collections import Counter
from dataclasses import replace
from functools import partial

from coca_mindspeed.grading.mathematics.final_answer import final_answer
from coca_mindspeed.serving.answer_flow import AnswerFlow
from coca_mindspeed.serving.decision import Budget, Decision
from coca_mindspeed.serving.reader import ConfidenceReader
from coca_mindspeed.serving.request import RoutedRequest
from coca_mindspeed.serving.side_by_side import side_by_side, succeeded
from coca_mindspeed.serving.tier import Messages, Tier


async def vote(request: RoutedRequest, tier: Tier, messages: Messages, samples: int, budget: Budget) -> Decision:
    """Answer by the largest cluster of equal final answers; between equals the one that was asked first.

    Returns:
        ``sample``, and the answer was given; or what the tier's second gate says of the winner instead.
    """
    left = request.tokens_left()
    share = budget if left is None else replace(budget, tokens=max(1, left // samples))
    asked = (partial(_sample, request, tier, messages, number, share) for number in range(samples))
    answers = succeeded(await side_by_side(*asked))
    finals = [final_answer(flow.given, boxed_only=True) or flow.given.strip() for flow in answers]
    winner, votes = Counter(finals).most_common(1)[0]
    flow = answers[finals.index(winner)]
    trace = request.trace
    trace.reason += f"; {votes} of {len(finals)} agree"
    noted = Decision("sample", trace.reason, samples)
    looked = request.look_again(tier, flow, budget)
    if looked is not None:
        if looked.action != "answer":
            return looked
        noted = Decision("sample", f"{noted.reason}; {looked.reason}", samples)
        trace.decide(tier.name, noted)
    trace.basis = None if trace.stated is None else "vote"
    await request.sink.begin(trace, flow.given)
    trace.answer_tokens, trace.finish_reason = flow.tokens, flow.finish_reason
    return noted


async def _sample(request: RoutedRequest, tier: Tier, messages: Messages, number: int, budget: Budget) -> AnswerFlow:
    """One whole answer, kept."""
    flow = request.flow(tier, kept=True)
    reader = ConfidenceReader()
    others = dict(request.ask.others)
    if "seed" in others:
        others["seed"] += number + 1
    generate = replace(request.generate(tier, messages, budget), others=others)
    async with tier.backend.stream(generate) as blocks:
        async for block in blocks:
            for piece in block:
                request.trace.generated(tier.name, piece.tokens, tier.config.price)
                in_confidence = reader.state == "reading"
                text = reader.feed(piece.text) + (reader.finish() if piece.finish_reason else "")
                log_probs, tokens = ((), 0) if in_confidence else (piece.log_probs, piece.tokens)
                flow.feed(text, log_probs, tokens)
                flow.finish_reason = flow.finish_reason or piece.finish_reason
            if flow.is_full() and not blocks.finished:
                break
    await flow.close()
    return flow
