"""The response format (paper, equation 5): prompts and strict parsing.

``<confidence> s </confidence> answer``.  The confidence segment is everything up to and including the closing
tag; the answer segment is the rest.  A response whose confidence does not parse is *invalid*: it is never clamped
and never guessed.  With thinking, the confidence is the first thing inside the thought:
``[<think>] <confidence> s </confidence> thought </think> answer``.  What the paper leaves open is settled in
docs/method.md.
"""

import re
from dataclasses import dataclass
from typing import Literal

OPEN_TAG = "<confidence>"
CLOSE_TAG = "</confidence>"
THINK_TAG = "<think>"
END_THINK_TAG = "</think>"

ConfidencePosition = Literal["first", "last", "both"]

_ASKED = "You need to provide the answer as well as its confidence level to follow-up questions. "
_ASKED_TWICE = (
    "You need to provide the answer to follow-up questions as well as its confidence level, once before the answer "
    "and once after it. "
)
_FORMAT = (
    "The confidence level is a number between 0 and 1 (inclusive) enclosed within <confidence> </confidence> tags. "
    "The final format that must be followed is:\n"
)
_STATED = "<confidence> confidence level here </confidence>"
_ANSWER = "answer here"
#: ``first``: the paper's appendix, "Prompt Format", verbatim.  It gives the answer-first baseline (RLCR) no prompt: the
#: same words, in the other order.
SYSTEM_PROMPTS: dict[ConfidencePosition, str] = {
    "first": f"{_ASKED}{_FORMAT}{_STATED} {_ANSWER}",
    "last": f"{_ASKED}{_FORMAT}{_ANSWER} {_STATED}",
    "both": f"{_ASKED_TWICE}{_FORMAT}{_STATED} {_ANSWER} {_STATED}",
}


def thinking_prompt(system_prompt: str) -> str:
    """A system prompt of ours, whose format names the thought too; any other text as it is."""
    if system_prompt not in SYSTEM_PROMPTS.values():
        return system_prompt
    head, _, response_format = system_prompt.rpartition("\n")
    thought = f"thoughts here {END_THINK_TAG} {_ANSWER}"
    return f"{head}\n{THINK_TAG} {response_format.replace(_ANSWER, thought)}"


MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
SHORT_ANSWER = "Answer as briefly as possible: the answer itself, without explanation."
#: After a question whose record names no instruction.  Code has its benchmark's instruction in its metadata.
CATEGORY_INSTRUCTIONS = {"math": MATH_INSTRUCTION, "factual": SHORT_ANSWER}

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
        answer: the text without the confidences that were read; of an invalid response, the whole text.  With thinking,
            of this the text behind the thought, which is empty if the thought does not end.
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
        thinking: the response begins inside a thought, or with its opening tag.  The first ``</think>`` ends the
            thought.  A confidence before the answer is the first thing inside the thought, one after the answer stands
            behind the thought.
        in_training: with ``thinking``, a confidence before ``<think>`` is invalid, since reasoning parsers of servers
            drop that text; readers of finished responses accept it.
    """

    position: ConfidencePosition = "first"
    decimals: int | None = None
    thinking: bool = False
    in_training: bool = False

    def __post_init__(self) -> None:
        if self.position not in SEGMENTS:
            raise ValueError(f"position should be one of {', '.join(SEGMENTS)}, found {self.position!r}")
        if self.decimals is not None and self.decimals < 1:
            raise ValueError(f"decimals should be at least 1 or None, found {self.decimals}")

    @property
    def grammar(self) -> str:
        """Regular expression of a confidence that begins a response, white space included; group 1 is the number."""
        opening = rf"(?:{_WHITESPACE}{re.escape(THINK_TAG)})?" if self.thinking else ""
        return opening + self._confidence

    @property
    def _confidence(self) -> str:
        """Regular expression of a stated confidence and the white space before it; group 1 is the number."""
        number = _NUMBER if self.decimals is None else rf"0\.[0-9]{{{self.decimals}}}|1\.0{{{self.decimals}}}"
        return rf"{_WHITESPACE}{re.escape(OPEN_TAG)}{_WHITESPACE}({number}){_WHITESPACE}{re.escape(CLOSE_TAG)}"

    def __call__(self, text: str) -> ParsedResponse:
        stated: list[float | None] = []
        if self.position != "last":
            match = re.match(self.grammar, text)
            if match and self._precedes_thought(text, match):
                match = None
            stated.append(match and float(match[1]))
            text = text[match.end() :] if match else text
        if self.thinking:
            text = text.partition(END_THINK_TAG)[2]
        if self.position != "first":
            start = text.rfind(OPEN_TAG)
            match = re.compile(self._confidence + _WHITESPACE).fullmatch(text, start) if start >= 0 else None
            stated.append(match and float(match[1]))
            text = text[: match.start()] if match else text
        return ParsedResponse(stated[0], text, *stated[1:])

    def _precedes_thought(self, text: str, confidence: re.Match[str]) -> bool:
        """Whether training refuses a confidence, since the thought's opening tag follows it."""
        if not (self.thinking and self.in_training) or THINK_TAG in confidence[0]:
            return False
        return THINK_TAG in text[confidence.end() :].partition(END_THINK_TAG)[0]


@dataclass(frozen=True)
class ResponseFormat:
    """Position and decimals of the confidences; ``spaced`` puts spaces around it, as the method's prompt does.

    ``thinking``: the response begins inside a thought.
    """

    position: ConfidencePosition
    decimals: int = 2
    spaced: bool = False
    thinking: bool = False

    def response(self, answer: str, *confidences: float) -> str:
        """The answer with its confidence, or with both confidences in position ``both``; its thought is empty."""
        given = iter(confidences)
        answer = f"\n{END_THINK_TAG}\n\n{answer}" if self.thinking else answer
        return (" " if self.spaced else "").join(
            answer if segment == "answer" else self.stated(next(given)) for segment in SEGMENTS[self.position]
        )

    def stated(self, confidence: float) -> str:
        """A confidence in its tags."""
        space = " " if self.spaced else ""
        return f"{OPEN_TAG}{space}{confidence:.{self.decimals}f}{space}{CLOSE_TAG}"


def parse_response(
    text: str, *, position: ConfidencePosition = "first", decimals: int | None = None, thinking: bool = False
) -> ParsedResponse:
    """Parse one decoded response, without special tokens; see :class:`ResponseParser` for the options."""
    return ResponseParser(position, decimals, thinking)(text)
