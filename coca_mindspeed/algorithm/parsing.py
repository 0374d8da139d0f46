"""The response format (paper, equation 5): prompts and strict parsing.

``<confidence> s </confidence> answer``.  The confidence segment is everything up to and including the closing
tag; the answer segment is the rest.  A response whose confidence does not parse is *invalid*: it is never clamped
and never guessed.  What the paper leaves open is settled in docs/method.md.
"""

import re
from dataclasses import dataclass
from typing import Literal

OPEN_TAG = "<confidence>"
CLOSE_TAG = "</confidence>"

# The paper's appendix, "Prompt Format", verbatim.
CONFIDENCE_FIRST_PROMPT = (
    "You need to provide the answer as well as its confidence level to follow-up questions. "
    "The confidence level is a number between 0 and 1 (inclusive) enclosed within "
    "<confidence> </confidence> tags. "
    "The final format that must be followed is:\n"
    "<confidence> confidence level here </confidence> answer here"
)
# The answer-first baseline (RLCR) is not given a prompt by the paper: the same words, in the other order.
ANSWER_FIRST_PROMPT = (
    "You need to provide the answer as well as its confidence level to follow-up questions. "
    "The confidence level is a number between 0 and 1 (inclusive) enclosed within "
    "<confidence> </confidence> tags. "
    "The final format that must be followed is:\n"
    "answer here <confidence> confidence level here </confidence>"
)
CONFIDENCE_TWICE_PROMPT = (
    "You need to provide the answer to follow-up questions as well as its confidence level, once before the answer "
    "and once after it. "
    "The confidence level is a number between 0 and 1 (inclusive) enclosed within "
    "<confidence> </confidence> tags. "
    "The final format that must be followed is:\n"
    "<confidence> confidence level here </confidence> answer here <confidence> confidence level here </confidence>"
)
MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
SHORT_ANSWER = "Answer as briefly as possible: the answer itself, without explanation."
#: After a question whose record names no instruction.  Code has its benchmark's instruction in its metadata.
CATEGORY_INSTRUCTIONS = {"math": MATH_INSTRUCTION, "factual": SHORT_ANSWER}

ConfidencePosition = Literal["first", "last", "both"]
#: Segments of a response, in the order in which they are written; each has an advantage of its own.
SEGMENTS: dict[ConfidencePosition, tuple[str, ...]] = {
    "first": ("confidence", "answer"),
    "last": ("answer", "confidence"),
    "both": ("confidence", "answer", "confidence_after"),
}

_WHITESPACE = r"[ \t\n\r\f\v]*"
# A plain ASCII decimal in [0, 1]: the grammar itself excludes signs, exponents, percent and anything above 1.
_NUMBER = r"[01]|0?\.[0-9]+|1\.0+"


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The parts of a response.

    Attributes:
        confidence: s in [0, 1], or None if the response is invalid.
        answer: the text without the confidences that were read; of an invalid response, the whole text.
        confidence_after: the second confidence of position ``both``, likewise.
    """

    confidence: float | None
    answer: str
    confidence_after: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseParser:
    """Strict parser of responses.

    Attributes:
        position: ``first`` for confidence-first responses: only whitespace may precede the opening tag and the
            first tag pair counts.  ``last`` for answer-first ones (RLCR): only whitespace may follow the closing
            tag and the last pair counts.  ``both``: one of each, of which the first is *the* stated confidence.
        decimals: exactly so many digits after the point, or None for any plain decimal.  A fixed width keeps a
            small model from shortening the confidence, which would shift every position of its answer.
    """

    position: ConfidencePosition = "first"
    decimals: int | None = None

    def __post_init__(self) -> None:
        if self.position not in SEGMENTS:
            raise ValueError(f"position should be one of {', '.join(SEGMENTS)}, found {self.position!r}")
        if self.decimals is not None and self.decimals < 1:
            raise ValueError(f"decimals should be at least 1 or None, found {self.decimals}")

    @property
    def grammar(self) -> str:
        """Regular expression of a stated confidence and the white space before it; group 1 is the number."""
        number = _NUMBER if self.decimals is None else rf"0\.[0-9]{{{self.decimals}}}|1\.0{{{self.decimals}}}"
        return rf"{_WHITESPACE}{re.escape(OPEN_TAG)}{_WHITESPACE}({number}){_WHITESPACE}{re.escape(CLOSE_TAG)}"

    def __call__(self, text: str) -> ParsedResponse:
        stated: list[float | None] = []
        if self.position != "last":
            match = re.match(self.grammar, text)
            stated.append(match and float(match[1]))
            text = text[match.end() :] if match else text
        if self.position != "first":
            start = text.rfind(OPEN_TAG)
            match = re.compile(self.grammar + _WHITESPACE).fullmatch(text, start) if start >= 0 else None
            stated.append(match and float(match[1]))
            text = text[: match.start()] if match else text
        return ParsedResponse(stated[0], text, *stated[1:])


@dataclass(frozen=True)
class ResponseFormat:
    """Position and decimals of the confidences; ``spaced`` puts spaces around it, as the method's prompt does."""

    position: ConfidencePosition
    decimals: int = 2
    spaced: bool = False

    def response(self, answer: str, *confidences: float) -> str:
        """The answer with its confidence, or with both confidences in position ``both``."""
        space, given = " " if self.spaced else "", iter(confidences)
        return space.join(
            answer if segment == "answer" else f"{OPEN_TAG}{space}{next(given):.{self.decimals}f}{space}{CLOSE_TAG}"
            for segment in SEGMENTS[self.position]
        )


def parse_response(text: str, *, position: ConfidencePosition = "first", decimals: int | None = None) -> ParsedResponse:
    """Parse one decoded response, without special tokens; see :class:`ResponseParser` for the options."""
    return ResponseParser(position, decimals)(text)
