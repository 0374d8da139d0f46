r"""Find the final answer of a response, as text, in one pass over it; nothing is evaluated.

In this order: the last box; ``<answer>`` if no box follows it; the last ``####``, ``A:`` or "the answer is"; the last
sentence with a number or formula. A sentence, also one in a box or a tag, states an answer only if it states one value
plainly: not where it denies, bounds, doubts or offers a choice.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from coca_mindspeed.grading.math.normalise import plain_characters, read_answer
from coca_mindspeed.grading.math.plain import is_words
from coca_mindspeed.grading.math.units import changes_value

# A backslash takes the next character with it, so that \{ and \} are text and not grouping.
_BRACES = re.compile(r"\\+(?:boxed|fbox)\s*(?:\{|(?P<token>[^\s{\\]|\\[a-zA-Z]+))|\\.|[{}]", re.DOTALL)
# Other rules look only here: an answer that is not at the end is not a final answer.
_TAIL_CHARACTERS = 2_000
_MAX_SENTENCE, _MAX_BOXED_SENTENCE, _MAX_WORDS = 400, 160, 200


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
        return _content(without_boxes(boxed).strip(), _IN_BOX)
    if boxed_only or is_cut_off(text):
        return None
    return _stated(plain_characters(text[-_TAIL_CHARACTERS:])) if tagged is None else _content(text.strip(), _IN_TAG)


# Pandoc's rule for dollars: no blank inside, no digit after the closing one, so that "$20 and $30" is money.
_FORMULA = re.compile(
    r"""(?<!\\)\$\$((?:\\.|[^$\\])+)\$\$
    | (?<![\\$])\$(?![\s$,;:!?)]|\.(?!\d))((?:\\.|[^$\\\n])+)(?<![\s=+*/(<-])\$(?![\d$])
    | (?<![\\$])\$\ ((?:\\[a-zA-Z]+|\\.|[^$\n\\a-zA-Z]|[a-zA-Z](?![a-zA-Z]))+)(?<=\ )(?<![-=+*/(<,]\ )\$(?!\ ?[\d$])
    | \\\((.+?)\\\) | \\\[(.+?)\\\] | (\\begin\{\w+\}.+?\\end\{\w+\})
    | (?<![\\$\w])([-+\w(.]*\\(?:(?:[dtc]?frac|sqrt|d?binom)(?=[\d{\[\\])|(?:pi|infty)(?![a-zA-Z]))
        (?:\{(?:[^{}\n]|\{[^{}\n]*\})*\}|[^\s$.,;{}]|[.,](?=\w))*(?![^\s.,;:!?)]))""",
    re.VERBOSE | re.DOTALL,
)
_MASK = "\ue000"  # replaces each character of a formula, so that rules for prose do not match inside
_MONEY = r"(?:\\?\$|[€£¥₹]|(?<![A-Za-z])(?:USD|EUR|GBP|Rs\.?)(?![A-Za-z]))\ ?"
_NUMBER = rf"""(?<![A-Za-z_^\\.\d])(?<!\d[,/])
    (?:(?<![\w)\]}}%{_MASK}])(?<![\d)\]}}%{_MASK}]\ )[-+]\ ?)?(?:{_MONEY}[-+]?)?
    (?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:\ \d+/\d+|/\d+(?:\.\d+)?|(?:\ :\ \d+|:\d+)+|e[-+]?\d+)?
    (?:\ ?\\?%|\ ?\^\{{?\s*\\circ\s*\}}?|[A-Za-z]+)?(?:\^\{{?-?\w+\}}?)?(?:\ ?\\?\$(?!\ ?\d))?"""
_VALUE = re.compile(rf"{_MASK}+|{_NUMBER}", re.VERBOSE)
# 60 inches + $5 * 12 = 7
_OPERATION = re.compile(
    rf"""(?:[\ /][a-zA-Z]+){{0,3}}\)*\s*(?:(?P<equals>=\s*)
        | (?:[-+*/×÷^–]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=\s*[\d$]))\s*\(*)(?P<value>{_MASK}+|{_NUMBER})\)*""",
    re.VERBOSE,
)
_VARIABLE = re.compile(r"(?<![a-zA-Z])(?!(?<= )x )[a-zA-Z](?![a-zA-Z])")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:and|or|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|mod|inf|infinity|base)\b)[^\W\d_]{2,}"
)
_MARKUPS = [
    (re.compile(pattern, re.IGNORECASE), new)
    for pattern, new in (
        (r"<<[^<>\n]{0,200}>>", ""),  # GSM8K's calculator
        (r"(?<![\w)])\*\*|\*\*(?![\w(])", ""),
        (r"\${1,2}\s*(?=#{4})", ""),
        (r"\b(not)\s*\n\s*", r"\1 "),
        (r"\\text\s*\{([^{}]*)\}(?![^$\n]*\$)", r" \1 "),
        (r"\b(?:negative|minus)\s+(?=\$?\d)", "-"),
    )
]
_MARKUP = " \t\n:*_#`\"'“”"
_SENTENCE_END = re.compile(
    r"(?<!\bRs)(?<!\bsq)(?<!\bcu)(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\.[A-Za-z])(?<!\\)[.!?](?=[\s*_\"'”)\]<]|$)|\n"
)
_OPENING = re.compile(
    r"""(?<!wrong\s)(?<!incorrect\s)(?<!false\s)(?<!\w)(?:answer|ans)\b[*_]*
        (?:[^.!?\n:=\\\d]{0,60}?[*_\s]*[:=] | \.\s*(?=[-$\d]) | [*_\s]*\n(?=\s*\S)
          | [^.!?\n:=\\]{0,80}?
            (?:['’]s\b|\s(?:is|was|equals?|becomes?|(?:should|would|must|will)\s+be|\w+\s+out\s+to\s+be)\b))
        (?!\s+not\b|n['’]t)[*_]*\s*[:=]?
    | (?<!\#)\#{4,5}(?!\#)(?!\s*(?:\d{1,2}[.):]\s+\D|step\b))
    | ^[ \t*]*(?P<option>A)[*]*:(?=\s*\S) | <answer> | 答案[*_]*\s*(?:是|为|:)""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_OPTION_B = re.compile(r"^[ \t*(]*B[*]*[:.)]", re.MULTILINE)
# A sentence with one of these states no answer plainly.
_DOUBT = re.compile(
    r"""\b(?:not|never|cannot|neither|nor|or|either|maybe|perhaps|possibly|alternatively|unless|otherwise|false|wrong
        |incorrect|guess|among|candidates|another|but|anything|except|rather|instead\s+of|satisf\w+
        |(?:above|below|beyond|between|(?:less|more|greater|fewer|larger|smaller)\s+than)(?=\W*[\d\ue000])
        |(?:might|may|could)\s+(?:also\s+)?be|at\s+(?:least|most)|up\s+to|as\s+well\s+as|one\s+of|(?:question|step)\s+\#?\d
        |(?:twice|double|half(?:\s+of)?|(?:root|square|cube)\s+of)(?=\s+\W*\d))\b
      | \S\s+if\b | n['’]t\b | (?<!\\)%\s+of\s+\d | \d\s*or\s+more | \? | [\d\ue000]\s+to\s+[\d\ue000]""",
    re.VERBOSE | re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"""(?:^|[.!?\n])[\s*_]*(?:(?:(?:oh|but|hmm+|no)\s*[,.]?\s*)*(?:wait|actually|no\s*[,.]|correction|sorry|alternatively|or)\b
      | (?:this|that|it)(?:\s+is|\s+was)(?:n['’]t|\s+(?:\w+\s+)?(?:wrong|incorrect|false|not)\b))""",
    re.VERBOSE | re.IGNORECASE,
)
_STATED = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|equal\s+to|totals?|gives?|makes?|costs?)(?:\s+(?:about|approximately|exactly|only|just"
    r"|now|then|thus|therefore|equal\s+to|given\s+by|a\s+total\s+of|option|choice))*|[=:≈]|\\approx)[\s*_(\[]*$",
    re.IGNORECASE,
)
_COPULA = re.compile(r"\b(?:is|are|equals)\b")
_IN_BOX, _IN_TAG = _COPULA, re.compile(r"\b(?:is|are|equals|has|have|with)\b")
_REASON = re.compile(
    r"(?:[\s,;(](?:because|since|as|when|while|given|where|which|after|before|every|per|for|in|on|at|of|from|with|by|to)\b"
    r"|\((?=[^()]*[^\W\d_]{3}))|=\s*$",
    re.IGNORECASE,
)
_BECAUSE = re.compile(r"(?<=\S)\s+because\b.*", re.DOTALL | re.IGNORECASE)
# Since x = 4 and y = 7, ...
_CLAUSE = re.compile(r"\s*(?:since|given|if|as|after|because|when|while)\b[^,]*,\s", re.IGNORECASE)
_CONCLUDES = re.compile(
    r"(?:^|[\s,;])(?:so|therefore|thus|hence|then|which\s+(?:means|gives|makes|leaves)|leaving|giving|making)\b", re.I
)
_CONCLUSION = re.compile(r"(?:^|[.!?\n])\W*(?:so|therefore|thus|hence|finally|altogether|in\s+total)\b", re.IGNORECASE)
_CONTINUES = re.compile(r"\s*(?:and\s+(?:a|one|\d)\b|[-+*/^=]|\\(?:times|cdot))\s*[a-zA-Z(\\]")
_BARE = re.compile(r"\s*[-\d./]+\s*")
_SCALED = re.compile(r"\s?\\?%|\s+(?:percent|per\s+cent|hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_SUBJECT = re.compile(
    rf"\W*(?:(?:so|thus|hence|therefore)\W+)?(?:the\s+)?(?:\w+\s+){{0,2}}(?:value\s+of\s+)?({_MASK}+|[a-zA-Z])"
    r"\s+(?:is|equals|must\s+be)(?:\s+equal\s+to)?[\s*]*",
    re.IGNORECASE,
)
_UNIT_WORD = re.compile(r"[\s-]+([ap]\.m\b\.?|[A-Za-z]+(?:/[A-Za-z]+)?\.?(?:\s*\^\s*\{?[23]\}?)?)")


def _content(text: str, verbs: re.Pattern[str]) -> str | None:
    """The content of a box or tag; of a sentence in it, the value that it states."""
    spoken = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", plain_characters(text)).strip(" .")
    if verbs.search(_masked(spoken)) and (verbs is _IN_TAG or len(spoken) <= _MAX_BOXED_SENTENCE):
        return _value(spoken) or text
    return text or None


def _masked(text: str) -> str:
    return _FORMULA.sub(lambda match: _MASK * len(match[0]), text)


def _stated(text: str) -> str | None:
    """The value that the end of a response states outside of boxes."""
    for markup, new in _MARKUPS:
        text = markup.sub(new, text)
    masked = _masked(text)
    options = _OPTION_B.search(masked)
    found = [match.end() for match in _OPENING.finditer(masked) if not (match["option"] and options)]
    after = 0
    for start in reversed(found[-8:]):
        start += len(masked[start:]) - len(masked[start:].lstrip(_MARKUP + ">"))
        closed = _SENTENCE_END.search(masked, start)
        end = closed.start() if closed else len(masked)
        if masked[end : end + 1] == "?" or _RETRACTED.search(masked[end:]) or _CONCLUSION.search(masked, end):
            after = end
            break
        if sentence := text[start : min(end, start + _MAX_SENTENCE)].strip(_MARKUP):
            return _value(sentence, explicit=True)
    whole = text.strip()
    if (
        not found
        and len(whole) <= _MAX_WORDS
        and is_words(whole)
        and not (_COPULA.search(whole) or _VALUE.search(whole))
    ):
        return whole
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(masked)), len(masked)]
    for begin, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
        sentence = text[max(begin, end - _MAX_SENTENCE) : end].strip(" .!\n")
        alone = sentence == whole.strip(" .!\n") and re.search(r"\w", sentence)
        if end > after and (alone or _VALUE.search(_masked(sentence))):
            previous = text[:begin].rstrip("\n").rpartition("\n")[2]
            if (_BARE.fullmatch(sentence) and _BARE.fullmatch(previous)) or _RETRACTED.search(masked[end:]):
                return None  # one value a line is a list
            return _value(sentence)
    return None


def _value(sentence: str, explicit: bool = False) -> str | None:
    """The one value that a sentence states, with its unit; None if it states none, several or none plainly."""
    sentence = re.sub(r"^<([^<>]+)>$", r"\1", sentence.strip(_MARKUP))
    masked = _masked(sentence)
    if not _PROSE.search(masked):
        return _inside(re.split(r"[=-]>", sentence)[-1])
    begin = clause.end() if (clause := _CLAUSE.match(masked)) else 0
    conclusion = max((match.end() for match in _CONCLUDES.finditer(masked, begin)), default=begin)
    begin = conclusion if _VALUE.search(masked, conclusion) else begin
    if _DOUBT.search(masked, begin):
        return None
    masked = _BECAUSE.sub("", masked[begin:])
    sentence = sentence[begin : begin + len(masked)]
    values = list(_values(masked))
    verbs = [match.end() for match in _COPULA.finditer(masked)]
    calculated = any(value.start > value.first for value in values)
    if len(verbs) == 1 and masked[verbs[0] :].strip() and not _PROSE.search(masked, verbs[0]) and not calculated:
        return _with_unit(sentence, masked, verbs[0], len(masked))
    if not values:
        words = re.split(r"\s(?:is|are)\s+", sentence)[-1] if explicit else ""
        return re.sub(r"^option\s+", "", words) if words and len(words.split()) <= 6 else None
    chosen = [value for value in values if value.stated][-1:] or values[:1]
    first, start, end, _ = chosen[0]
    for other in values:
        between = masked[end : other.first]
        if other.first >= end and (not _REASON.search(between) or re.search(r"\b(?:and|but)\b", between)):
            return None
        if other.end <= first and other.stated and _COPULA.search(masked[other.end : first]):
            return None
    return None if _CONTINUES.match(masked, end) else _with_unit(sentence, masked, start, end)


class _Value(NamedTuple):
    """A number, formula or calculation: where it starts, where its last value is, whether it is stated."""

    first: int
    start: int
    end: int
    stated: bool


def _values(masked: str) -> Iterator[_Value]:
    end = 0
    while match := _VALUE.search(masked, end):
        first = start = match.start()
        end = match.end()
        while operation := _OPERATION.match(masked, end):
            equals = operation["equals"] and not _VARIABLE.search(masked, first, end)
            start, end = (operation.start("value") if equals else start), operation.end()
        yield _Value(first, start, end, start > first or bool(_STATED.search(masked[max(0, first - 60) : first])))


def formulas(text: str) -> Iterator[str]:
    """The contents of a text's formulas; amounts of money (``$20 and $30``) are none."""
    for match in _FORMULA.finditer(text):
        yield next(group for group in match.groups() if group is not None)


def _inside(text: str) -> str:
    text = text.strip(_MARKUP)
    formula = _FORMULA.fullmatch(text)
    inner = text if formula is None else next(formulas(text))
    return re.sub(r"^\s*\\text\s*\{[^{}]*\}[^={}]*=(?:.*=)?", "", inner).strip()


def _with_unit(sentence: str, masked: str, start: int, end: int) -> str:
    """A value with its unit and the name of its variable; with all that follows if the next words change it."""
    text = _inside(sentence[start:end])
    if scale := _SCALED.match(masked, end):
        return text + scale[0]
    words: list[str] = []
    while len(words) < 4 and (word := _UNIT_WORD.match(masked, end)):
        words.append(word[1])
        end = word.end()
    if words and changes_value(words[0]):
        return f"{text} {' '.join(words)}"
    body = read_answer(text).body
    with_words = (f"{text} {' '.join(words[:count])}" for count in range(len(words), 0, -1))
    text = next((each for each in with_words if read_answer(each).body == body), text)
    subject = _SUBJECT.fullmatch(masked[:start])
    variable = _inside(sentence[slice(*subject.span(1))]) if subject else ""
    return f"{variable}={text}" if re.fullmatch(r"[a-zA-Z](?:_\{?\w\}?)?", variable) else text
