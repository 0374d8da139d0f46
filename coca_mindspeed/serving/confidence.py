"""One number from what a model said about its confidence: its digits' expected value, or the mean of several."""

import math
from collections.abc import Sequence

from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.serving.pieces import TokenLogProbs


def expected_confidence(tokens: Sequence[TokenLogProbs], parser: ResponseParser | None = None) -> float | None:
    """The stated confidence with each of its digits behind the point replaced by that digit's expected value.

    The alternatives of one token are weighted by their probabilities, the other tokens as they were sampled; an
    alternative that would make the number invalid has no weight.  The digit before the point stays as it is: nobody
    sampled what would have followed another one.

    Args:
        tokens: of the confidence segment, each with its most probable alternatives.
        parser: decides what is valid.

    Returns:
        A confidence in [0, 1], None where the sampled one is invalid.
    """
    parser = parser or ResponseParser()
    pieces = [token.token for token in tokens]
    stated = parser(_text(pieces)).confidence
    if stated is None:
        return None
    expected = stated
    seen_point = False
    for place, token in enumerate(tokens):
        written = token.token.decode("utf-8", "replace")
        if seen_point and written.isdecimal():
            expected += _shift(pieces, place, token, stated, parser)
        seen_point = seen_point or "." in written
    return min(1.0, max(0.0, expected))


def _shift(pieces: Sequence[bytes], place: int, token: TokenLogProbs, stated: float, parser: ResponseParser) -> float:
    """How much the alternatives at ``place`` move the number on average."""
    weight = moved = 0.0
    for other, log_prob in {token.token: token.log_prob, **dict(token.top)}.items():
        if len(other) != len(token.token) or not other.isdigit():
            continue
        value = parser(_text([*pieces[:place], other, *pieces[place + 1 :]])).confidence
        if value is not None:
            weight += math.exp(log_prob)
            moved += math.exp(log_prob) * (value - stated)
    return moved / weight if weight > 0 else 0.0


def _text(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


def mean_confidence(stated: Sequence[float | None]) -> float | None:
    """The mean of several stated confidences; None where fewer than half of them are valid.

    Rounded where floats have no more to say, so that equal ones have their own value for a mean and stay in its band.
    """
    valid = [s for s in stated if s is not None]
    return round(math.fsum(valid) / len(valid), 12) if valid and 2 * len(valid) >= len(stated) else None
