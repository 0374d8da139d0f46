r"""Find the final answer of a response, as text; nothing is evaluated.

In this order: the last box; ``<answer>`` if no box follows it; the last ``####``, ``A:`` or "the answer is"; the last
sentence, if it has a number or formula. A sentence states an answer only if it states one value plainly.
"""

import functools
import re
from collections.abc import Iterator

from coca_mindspeed.grading.math.normalise import plain_characters
from coca_mindspeed.grading.math.plain import is_words, plain_text

# A backslash takes the next character with it, so that \{ and \} are text and not grouping.
_BRACES = re.compile(r"\\+(?:boxed|fbox)\s*(?:\{|(?P<token>[^\s{\\]|\\[a-zA-Z]+))|\\.|[{}]", re.DOTALL)
_TAIL_CHARACTERS, _MAX_SENTENCE, _MAX_WORDS = 2_000, 400, 200  # an answer outside of a box is at the end


@functools.lru_cache(maxsize=1)  # a response is asked for three times
def _boxes(text: str) -> tuple[str | None, str | None]:
    """Return the content of the last complete box (the outermost of nested boxes), and of an unclosed box behind it."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # per open brace: where its box's content starts, or None for a plain group
    for match in _BRACES.finditer(text) if "box" in text else ():
        if match["token"]:
            last = match.span("token")
        elif match[0] == "}":
            start = opened.pop() if opened else None
            last = last if start is None else (start, match.start())
        elif match[0].endswith("{") and match[0] != r"\{":
            opened.append(None if match[0] == "{" else match.end())
    unclosed = next((start for start in reversed(opened) if start is not None and (not last or start > last[1])), None)
    return last and text[slice(*last)], None if unclosed is None else text[unclosed:]


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete ``\boxed{...}`` or ``\fbox{...}``; of nested ones, the outermost.

    An unclosed box after it means that the response was cut off: None, unless that box repeats the last one so far.
    """
    last, unclosed = _boxes(text)
    return None if last is None or (unclosed is not None and not last.strip().startswith(unclosed.strip())) else last


def is_cut_off(response: str) -> bool:
    return last_boxed(response) is None and _boxes(response)[1] is not None


def without_boxes(text: str) -> str:
    """Content of the last box in the last box, three deep at most; the text if there is none."""
    for _ in range(3):
        text = text if (inner := _boxes(text)[0]) is None else inner
    return text


def last_tagged(response: str) -> str | None:
    """Content of ``<answer>...</answer>`` if no box follows it."""
    opened = response.rfind("<answer>")
    closed = response.find("</answer>", opened) if opened >= 0 else -1
    if closed < 0 or "\\boxed" in response[closed:] or "\\fbox" in response[closed:]:
        return None
    return response[opened + len("<answer>") : closed]


def final_answer(response: str, boxed_only: bool = False) -> str | None:
    """Return the final answer of a response (without its confidence), or None."""
    tagged = None if boxed_only else last_tagged(response)
    text = response if tagged is None else tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return without_boxes(boxed).strip() or None
    if boxed_only or is_cut_off(text):
        return None
    if tagged is None:
        return _stated(plain_characters(text[-_TAIL_CHARACTERS:]))
    return _value(plain_characters(tagged)[:_MAX_SENTENCE].strip(" .\n")) or tagged.strip() or None


# Pandoc's rule for dollars: no blank inside, no digit after the closing one, so that "$20 and $30" is money.
_FORMULA = re.compile(
    r"""(?<!\\)\$\$((?:\\.|[^$\\])+)\$\$
    | (?<![\\$])\$(?![\s$,;:!?)]|\.(?!\d))((?:\\.|[^$\\\n])+)(?<![\s=+*/(<-])\$(?![\d$])
    | \\\((.+?)\\\) | \\\[(.+?)\\\] | (\\begin\{\w+\}.+?\\end\{\w+\})""",
    re.VERBOSE | re.DOTALL,
)
_MASK = "\ue000"  # replaces each character of a formula, so that rules for prose do not match inside
_VALUE = re.compile(
    rf"{_MASK}+|(?<![A-Za-z_^\\.\d])(?<![-+*/^])(?<![-+*/^]\ )(?:(?<![\w)])(?<![\d)]\ )(?<!\b[a-z]\ )[-+])?"
    r"(?:(?:\\?[$€£]|Rs\.?)\ ?[-+]?)?(?:[1-9]\d{0,2}(?:\ \d{3})+(?![\d/]|\ \d)|\.?\d[\d,./:]*)"
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:and|or|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|mod|inf|infinity|base)\b)[^\W\d_]{2,}"
)
# The letters of \frac xy and \sqrt{ab} are no words.
_ARGUMENTS = re.compile(
    r"\\(?:[dt]?(?:frac|binom)\s*(?:[a-zA-Z\d]{2}(?![a-zA-Z])|\{[^{}]*\}\s*\{[^{}]*\})|sqrt\s*\{[^{}]*\})"
)
_MARKUP = " \t\n:*_#`\"'“”"
_SENTENCE_END = re.compile(r"(?<!\bRs)(?<!\.[A-Za-z])(?<!\\)[.!?](?=[\s*_\"'”)\]<]|$)|\n")
_OPENING = re.compile(
    r"""(?<!wrong\s)(?<!incorrect\s)(?<!\w)answer\b[*_]*(?:[^.!?\n:=\\\d]{0,60}?[*_\s]*[:=] | [*_\s]*\n(?=\s*\S)
          | [^.!?\n:=\\]{0,80}?\s(?:is|was|equals?|should\s+be|will\s+be)\b)
        (?!\s+not\b|n['’]t)[*_]*\s*[:=]?(?:\s*option\b)? | (?<!\#)\#{4}(?!\#) | ^[ \t*]*(?P<option>A)[*]*:(?=\s*\S)""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_OPTION_B = re.compile(r"^[ \t*(]*B[*]*[:.)]", re.MULTILINE)
# A sentence with one of these states no answer plainly.
_DOUBT = re.compile(
    r"""\b(?:not|never|cannot|neither|nor|or|either|maybe|perhaps|possibly|alternatively|unless|otherwise|false|wrong
        |incorrect|guess|among|candidates|another|but|anything|except|rather|if|satisf\w+|than|above|below|beyond|between
        |(?:might|may|could)\s+be|at\s+(?:least|most)|up\s+to|one\s+of|negative|minus
        |(?:twice|double|half(?:\s+of)?|(?:root|square|cube)\s+of)(?=\s+\W*\d))\b | n['’]t\b | \?""",
    re.VERBOSE | re.IGNORECASE,
)
_CONFIDENCE = re.compile(  # behind the answer
    r"""(?<=[.!\n*])\s{0,9}(?:I(?:\ am|['’]m)\ (?:(?:about|around|roughly)\ )?\d[\d.]*\ ?\\?%\ (?:sure|confident|certain
    )|(?:my\ )?confidence(?:\ level)?(?:\ is|:)\s*\d[\d.]*\ ?\\?%?)[.!\s*]*$""",
    re.VERBOSE | re.IGNORECASE,
)
_RETRACTED = re.compile(r"\b(?:wait|actually|no|not|correction|or|wrong|incorrect|false)\b|n['’]t\b", re.IGNORECASE)
_STATES = re.compile(r"(?:\b(?:is|are|was|equals)\b(?:\s+(?:about|exactly))?|[=:≈])\s*(?=\S)", re.IGNORECASE)
_REMARK = re.compile(r",\s+(?=[a-z]{2})|\s+(?:exactly|because)\b")
_SUBJECT = re.compile(rf"(?:^|[\s(])({_MASK}+|[a-zA-Z])\s+(?:is|equals)\s+$")


def _masked(text: str) -> str:
    return _FORMULA.sub(lambda match: _MASK * len(match[0]), text)


def _has_prose(masked: str) -> bool:
    return _PROSE.search(_ARGUMENTS.sub(" ", masked)) is not None


def _stated(text: str) -> str | None:
    """The value that the end of a response states outside of boxes."""
    text = re.sub(r"<<[^<>\n]{0,200}>>|(?<![\w)])\*\*|\*\*(?![\w(])", "", text)  # GSM8K's calculator, and bold
    text = _CONFIDENCE.sub("", text)
    masked = _masked(text)
    options = _OPTION_B.search(masked)
    openings = [match.end() for match in _OPENING.finditer(masked) if not (match["option"] and options)]
    if openings:
        start = openings[-1] + len(masked[openings[-1] :]) - len(masked[openings[-1] :].lstrip(_MARKUP + ">"))
    elif len(text) <= _MAX_WORDS and is_words(text.strip()) and not re.search(r"\d|\b(?:is|are)\b", text):
        return text.strip()
    else:
        start = max((match.end() for match in _SENTENCE_END.finditer(masked.rstrip(" .!\n"))), default=0)
        before = text[:start].rstrip().rpartition("\n")[2]
        if before.endswith("not") or (_VALUE.fullmatch(text[start:].strip()) and _VALUE.fullmatch(before)):
            return None  # one value a line is a list
    closed = _SENTENCE_END.search(masked, start)
    end = closed.start() if closed else len(masked)
    if masked[end : end + 1] == "?" or _RETRACTED.search(masked, end) or _VALUE.search(masked, end):
        return None
    sentence = text[start : min(end, start + _MAX_SENTENCE)].strip(_MARKUP)
    words = plain_text(sentence)
    return _value(sentence) or (words if openings and is_words(words) and not _STATES.search(words) else None)


def _value(sentence: str) -> str | None:
    """The one value that a sentence states plainly, with the words behind it; None if there is none or several."""
    masked = _masked(sentence)
    if not _has_prose(re.sub(r"\\text\s*\{[^{}]*\}", "", masked)):
        return _inside(sentence) or None
    states = [match.end() for match in _STATES.finditer(masked)]
    if len(states) == 1 and not _has_prose(masked[states[0] :]) and not _DOUBT.search(masked[: states[0]]):
        return _named(sentence, masked, states[0])
    starts = [match.start() for match in _VALUE.finditer(masked)]
    stated = [start for start in starts if start in states] or (starts if len(starts) == 1 else [])
    if _DOUBT.search(masked) or stated[-1:] != starts[-1:] or not stated:
        return None
    if re.search(rf"[A-Za-z:{_MASK}]", masked[stated[0] : stated[-1]]):  # more than a calculation: 12 - 5 = 7
        return None
    end = remark.start() if (remark := _REMARK.search(masked, stated[-1])) else len(masked)
    return _named(sentence[:end], masked[:end], stated[-1])


def _named(sentence: str, masked: str, start: int) -> str:
    """The value at ``start``, with the words behind it and the name of its variable."""
    end = start + len(masked[start:]) - len(masked[start:].lstrip(_MASK))
    text = _inside(sentence[start:end]) + sentence[end:]
    subject = _SUBJECT.search(masked[:start])
    name = _inside(sentence[slice(*subject.span(1))]) if subject else ""
    return f"{name}={text}" if re.fullmatch(r"[a-zA-Z](?:_\{?\w\}?)?", name) else text


@functools.lru_cache(maxsize=4_096)
def stated_formula(sentence: str) -> str | None:
    r"""``m+1`` of the gold answer ``The slope is $m+1$.``; None if there is no sentence, or another formula."""
    if "$" not in sentence:
        return None
    sentence = plain_characters(sentence).strip(" .\n")
    inside = [formula.strip() for formula in formulas(sentence)]
    masked = _masked(sentence)
    states = any(masked[match.end() :].startswith(_MASK) for match in _STATES.finditer(masked))  # not "for all $t$"
    is_sentence = len(inside) == 1 and states and _has_prose(masked)
    return inside[0] if is_sentence and _value(sentence) == inside[0] else None


def formulas(text: str) -> Iterator[str]:
    """The contents of a text's formulas; amounts of money (``$20 and $30``) are none."""
    for match in _FORMULA.finditer(text):
        yield next(group for group in match.groups() if group is not None)


def _inside(text: str) -> str:
    text = text.strip(_MARKUP)
    return next(formulas(text)).strip() if _FORMULA.fullmatch(text) else text
