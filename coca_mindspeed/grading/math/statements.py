"""Find the value that a response without a box states.

An explicit statement (``#### 5``, ``A: 5``, ``the answer is 5``) comes first; else the last sentence with a value
counts. A sentence states one value or one bare list. Every scan is linear in the text, whose length the caller bounds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from coca_mindspeed.grading.math.units import COUNTED, UNNAMED, leaves_value, read_unit

# Pandoc's rule for dollars: no blank inside, no digit after the closing one, so that "$20 and $30" is money. Also, no
# punctuation first and no operator last ("5$, 6$", "$4=$8"), and a formula without words may have blanks on both sides.
_FORMULA = re.compile(
    r"""(?<!\\)\$\$((?:\\.|[^$\\])+)\$\$
    | (?<![\\$])\$(?![\s$,;:!?)]|\.(?!\d))((?:\\.|[^$\\\n])+)(?<![\s=+*/(<-])\$(?![\d$])
    | (?<![\\$])\$\ ((?:\\[a-zA-Z]+|\\.|[^$\n\\a-zA-Z]|[a-zA-Z](?![a-zA-Z]))+)(?<=\ )(?<![-=+*/(<,]\ )\$(?!\ ?[\d$])
    | \\\((.+?)\\\)
    | \\\[(.+?)\\\]
    | (\\begin\{\w+\}.+?\\end\{\w+\})
    | (?<![\\$\w])([-+\w(.]*\\(?:(?:[dtc]?frac|sqrt|d?binom)(?=[\d{\[\\])|(?:pi|infty)(?![a-zA-Z]))
        (?:\{(?:[^{}\n]|\{[^{}\n]*\})*\}|[^\s$.,;{}]|[.,](?=\w))*(?![^\s.,;:!?)]))""",
    re.VERBOSE | re.DOTALL,
)
_MASK = "\ue000"  # replaces each character of a formula, so that rules for prose do not match inside
_NAME = re.compile(r"(?:\\(?:triangle|angle)\s*)?\\?[a-zA-Z]+(?:_\{?\w\}?)?(?:\(-?\w+\))?|[A-Z]+")  # x, f(2), ABC

_CURRENCY = r"(?:\\?\$|[€£¥₹]|(?<![A-Za-z])(?:USD|EUR|GBP|Rs\.?)(?![A-Za-z]))\ ?"
_NUMBER = rf"""(?<![A-Za-z_^\\.\d])(?<!\d[,/])(?<![_^]\{{)
    (?:(?<![\w)\]}}%{_MASK}])(?<![\w)\]}}%{_MASK}]\ )[-+]\ ?)?(?:{_CURRENCY}[-+]?)?
    (?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:\ \d+/\d+|/\d+(?:\.\d+)?|(?:\ :\ \d+|:\d+)+|e[-+]?\d+)?
    (?:\ ?\\?%|\ ?\^\{{?\s*\\circ\s*\}}?|[A-Za-z]+)?(?:\^\{{?-?\w+\}}?)?(?:\ ?\\?\$(?!\ ?\d))?"""
_VALUE = re.compile(rf"{_MASK}+|{_NUMBER}", re.VERBOSE)
_OPERATION = re.compile(
    rf"\s*(?:[-+*/×÷^]|\\(?:times|cdot|div)(?![a-zA-Z])|x(?=\s*\d))\s*(?:{_MASK}+|{_NUMBER})", re.VERBOSE
)
_BARE = re.compile(rf"\s*(?:{_NUMBER})[\s.,;]*", re.VERBOSE)
_ORDINAL = re.compile(r"\d(?:st|nd|rd|th)$")
_NUMBERED = re.compile(
    r"\b(?:step|part|question|problem|exercise|case|option|equation|eq|figure|line|method|chapter|no)\.?\s*[#(]?$", re.I
)

_SENTENCE_END = re.compile(
    r"(?<!\bRs)(?<!\bsq)(?<!\bcu)(?<!\bapprox)(?<!\bvs)(?<!\bNo)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)"
    r"(?<!\.[A-Za-z])(?<!\\)[.!?](?=[\s*_\"'”’)\]<]|$)|\n"
)
_LIST_MARKER = re.compile(r"^[ \t>]*(?:\d{1,2}[.)]|[*•-])[ \t]+(?=\S)", re.MULTILINE)
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")
_HASHES_IN_FORMULA = re.compile(r"\${1,2}\s*(?=\#{4})")
_BOLD = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s+(?=\$?\d)", re.IGNORECASE)
_MARKUP = " \t\n:*_#`\"'“”"
_BLANK, _BLANK_LINE = re.compile(r"[\s:*_#>]*"), re.compile(r"[ \t:*_]*")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:and|or|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|mod|inf|infinity)\b)[^\W\d_]{2,}"
)

_OPENING = re.compile(
    r"""(?<!wrong\s)(?<!incorrect\s)(?<!false\s)(?<!previous\s)(?<!to\s)(?<!can\s)(?<![^\W_])(?P<answer>answer|ans)\b[*_]*
        (?: \s*[:=]+ | \s+-\s+(?=\S) | \.\s*(?=[-$\d]) | [*_\s]*\n(?=\s*\S)
          | [^.!?\n:=\\\d]{0,60}?[*_\s]*[:=]
          | [^.!?\n:=\\]{0,80}?
            (?:['’]s\b|\s(?:is|was|equals?|becomes?|(?:would|should|must|will)\s+be|\w+\s+out\s+to\s+be)\b)
        )(?!\s+not\b|n['’]t)[*_]*\s*[:=]?
    | (?<!\#)(?P<hashes>\#{4,5})(?!\#) | ^[ \t*]*(?P<option>A)[*]*:(?=\s*\S) | <(?P<tag>answer)>
    | 答案[*_]*\s*(?:是|为|:)""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_CLOSING = re.compile(
    r"\s(?:is|as|be)\s+(?:the|our|my|your)\s+(?:(?:final|correct|right|desired|required|only)\s+)*answer\b(?!\s*(?:to\b[^.\n]*)?[:=])",
    re.IGNORECASE,
)
_OPTION_B = re.compile(r"^[ \t*(]*B[*]*[:.)]", re.MULTILINE)
_HEADING = re.compile(r"\d{1,2}[.):]\s+\D|(?:step|part|case|solution|explanation|approach|method)\b", re.IGNORECASE)
_CONCLUSION = re.compile(
    r"(?:^|[.!?\n])\W*(?:so|therefore|thus|hence|finally|altogether|in\s+total|in\s+conclusion|consequently)\b",
    re.IGNORECASE,
)
_ANNOUNCES = re.compile(
    r"(?:as\s+follows|below|the\s+following|this|that|then|thus|therefore|simply)?\W*", re.IGNORECASE
)
_MAX_WORDS = 6
_MAX_STATEMENTS = 8
_MAX_SENTENCE = 400
_WINDOW = 40  # characters before a value that are searched

_LEAD = r"""(?:about|approximately|approx\.?|roughly|around|exactly|only|just|now|then|thus|also|therefore|equal\s+to
    |simply|actually|still|indeed|a\s+total\s+of|all|to\s+be|be|given\s+by|option|choice)"""
_IS = re.compile(
    rf"""(?:\b(?:is|are|was|were|be|been|equals?|equal\s+to|totals?|becomes?|(?:it|that|he|she|there|here)['’]s)
        (?:\s+{_LEAD}){{0,3}} | [=:≈] | -+> | => | \\(?:approx|to|Rightarrow|implies)(?![a-zA-Z]))[\s*_(\[{{\\]*$""",
    re.VERBOSE | re.IGNORECASE,
)
_ADJUNCT = re.compile(
    r"""\b(?:of|for|in|at|from|with|per|by|on|to|within|over|after|before|during|every|each|until|than|into|between
        |through|the|these|those|all|first|last|next|another|other)(?:\s+(?:the|a|all|every|each|only|just))?[\s*]*$""",
    re.VERBOSE | re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"(?:^|[\s,;])(?:so|therefore|thus|hence|then|which\s+(?:means|gives|makes|leaves)|meaning|leaving|giving|making"
    r"|for\s+a\s+(?:grand\s+)?total\s+of)\b",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"[\s,;(](?:(?:because|since|as|when|while|given|if|where)\b|(?:that|who)\s+(?:is|are|was|were)\b"
    r"|which\s+(?:is|are)\s+(?:about|approximately|roughly|around|the|an?|also|even|odd|prime|less|more|greater)\b)",
    re.IGNORECASE,
)
_REMARK = re.compile(rf"{_REASON.pattern}|[\s,;(](?:after|before|compared|considering|by|due\s+to)\b", re.IGNORECASE)
_SUBORDINATE = re.compile(
    r"\W*(?:(?:so|and|therefore|thus|hence|now|but|then)[\s,]+)?"
    r"(?:since|because|as|if|when|given|after|while|for|with|by|in|at|out)\b",
    re.IGNORECASE,
)
_OTHER = re.compile(r"\b(?:and|or|but|while|whereas|otherwise|either)\b|[;,]", re.IGNORECASE)
_OR = re.compile(r"\b(?:or|either|otherwise)\b", re.IGNORECASE)
_LIST = re.compile(r"[\s,;/&*]*(?:(?:\(?[A-Za-z]\)|[A-Za-z][.:])[\s*]*)?")
_STARTS_WITH_OR = re.compile(r"\W*or\b", re.IGNORECASE)
_CONDITION = re.compile(r"\b(?:if|when|otherwise|else|unless)\b", re.IGNORECASE)
_EXPLAINED = re.compile(
    r"""\b(?:because|since|as|where|when|for|after|in|at|from|with|per|by|of|on|within|every|each|until|before|than
        |that|the|these|those|which|so|not|to\s+[a-z]+|(?!making|giving|leaving|being|totall?ing)[a-z]{2,}ing)\b[^,;]*$
      | (?:[=<>≈]|\\approx)\s*$""",
    re.VERBOSE | re.IGNORECASE,
)
_BECAUSE = re.compile(r"\b(?:because|since|where|which)\b[^,;]*$|=\s*$|\bnot\s*$", re.IGNORECASE)
_JOINS = re.compile(r"\b(?:and|or|but|while|whereas|otherwise)\b|;", re.IGNORECASE)
_ASIDE = re.compile(
    r"\((?=[^()]*(?:[^\W\d_]{3,}|[-+*/=×÷]))(?![^()]*\b(?:or|maybe|perhaps|possibly|else)\b)(?!\s*and\b)[^()]*\)",
    re.IGNORECASE,
)
_SAYS_MORE = re.compile(r"[\s*]*(?:is|are|was|were|sure|certain|confident|being|has|have|holds?)\b", re.IGNORECASE)

_PERCENT = re.compile(r"\s?\\?%|\s+(?:percent|per\s+cent|pct)\b", re.IGNORECASE)
_SCALE = re.compile(r"\s+(?:hundred|thousand|million|billion|trillion)\b(?!\s+\w*(?:and|illion)\b)", re.IGNORECASE)
_WORD = re.compile(r"[\s-]+([ap]\.m\b\.?|[A-Za-z]+(?:/[A-Za-z]+)?\.?(?:\s*\^\s*\{?[23]\}?)?)")
_MAX_UNIT_WORDS = 4
# Words after a number that do not change its value.
_NEUTRAL_WORDS = """
more less fewer greater in on at for to from left per of and with each every is are was were than when where while since
because as after before by so if which that this the a an who these those out away remaining total altogether unless or
but not maybe perhaps possibly have has had times between during until among he she it they we you i can do does did
will would should
"""
_NEUTRAL = frozenset(_NEUTRAL_WORDS.split())
_CHANGED = re.compile(
    rf"""\s*(?:
        (?:and|&)\s+(?:a|one|two|three|\d+)[\s/-]*(?:half|halves|third|quarter|fourth|fifth|sixth|eighth|tenth|\d)
      | to\s+the\b | times\s+[\d{_MASK}] | [+*×÷^] | [-/]\s*(?:[a-zA-Z]\b|[\d({_MASK}])
      | (?:more|less|fewer|greater)\s+than\s+(?:[$\d.,]+|{_MASK}+)(?!\S|\s+[a-z]) )""",
    re.VERBOSE | re.IGNORECASE,
)
_COMMAND = re.compile(
    r"\\(?!(?:approx|to|times|cdot|div|circ|text|implies|Rightarrow|therefore|quad|boxed|fbox)(?![a-zA-Z]))[a-zA-Z]+"
)
_LETTER = re.compile(r"(?:(?<=\d)[a-zA-Z](?![a-zA-Z])|\b[a-z]\s*[-+^])[^,;:]*=\s*$")
_OPERAND = re.compile(rf"(?:[+*/×÷^]|[\w)\]{_MASK}]\s*-)[\s(]*$")
_VARIABLE_IS = re.compile(
    rf"\W*(?:(?:so|thus|hence|therefore)\W+)?(?:the\s+)?(?:\w+\s+){{0,2}}(?:value\s+of\s+)?({_MASK}+|[a-zA-Z])"
    r"\s+(?:is|equals|must\s+be)(?:\s+equal\s+to)?[\s*]*",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?")
_NUMBER_ALONE = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+|/\d+)?")
_VERB = re.compile(r"\b(?:is|are|equals)\b")
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_LABEL = re.compile(r"^\s*\\text\s*\{[^{}]*\}[^={}]*=(?:.*=)?", re.DOTALL)
_COPULA = re.compile(r"\s(?:is|are|was|were)\s+", re.IGNORECASE)
_SAID = re.compile(r"\b(?:is|are|equals)(?:\s+(?:exactly|simply|just))?\s*$")
_OPTION = re.compile(r"^(?:option|choice)\s+(?=\(?[A-Z]\b)", re.IGNORECASE)
_NO_SUBJECT = re.compile(r"\b(?:not|no|never|false|wrong|incorrect|if|whether|that|yes)\b|n['’]t\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Value:
    """A number, formula or calculation in ``sentence[start:end]``."""

    start: int
    end: int
    stated: bool  # "is", "=" or the like precedes it
    adjunct: bool  # a preposition or an article precedes it (after 3 days)


def stated_answer(text: str) -> str | None:
    """The value that the end of a response (as plain characters) states outside of boxes, or None."""
    for markup in (_CALCULATOR, _LIST_MARKER, _HASHES_IN_FORMULA, _BOLD):
        text = markup.sub("", text)
    text = _NEGATIVE.sub("-", _without_text_command(text))
    masked = _masked(text)
    for start, end, explains in islice(_statements(masked), _MAX_STATEMENTS):
        stated = _read_statement(text[start : min(end, start + _MAX_SENTENCE)])
        if stated is None:
            continue
        retracted = _RETRACTED.search(masked[end:])
        if retracted or (explains and not _leads(masked[start:end]) and _CONCLUSION.search(masked, end)):
            return _last_value(text, masked, end)
        return stated or None
    return _last_value(text, masked, 0)


def formulas(text: str) -> Iterator[str]:
    """Yield the contents of a text's formulas; amounts of money (``$20 and $30``) are none."""
    for match in _FORMULA.finditer(text):
        yield _inside(match)


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def boxed_statement(content: str) -> str:
    r"""The value that a sentence in a box states (``\text{The sum is } 5``); other contents are unchanged."""
    if not _VERB.search(content):
        return content
    sentence = _without_text_command(content).strip(" .")
    values = _values(sentence, _masked(sentence))
    return (_read(sentence, values, explicit=True) if values else "") or content


def _without_text_command(text: str) -> str:
    pieces, position = [], 0
    for match in _TEXT.finditer(_masked(text)):
        pieces += [text[position : match.start()], " ", match[1], " "]
        position = match.end()
    return "".join([*pieces, text[position:]])


def _masked(text: str) -> str:
    return _FORMULA.sub(lambda match: _MASK * len(match[0]), text)


def _statements(masked: str) -> Iterator[tuple[int, int, bool]]:
    """Yield explicit statements from the last to the first: start, end, whether an explanation may follow."""
    found = [(match.end(), match) for match in _OPENING.finditer(masked)]
    found += [(match.start(), match) for match in _CLOSING.finditer(masked)]
    ends = [match.end() for match in _SENTENCE_END.finditer(masked)]
    for position, match in sorted(found, key=lambda each: each[0], reverse=True):
        if match.re is _CLOSING:
            yield max((end for end in ends if end <= position), default=0), position, False
            continue
        if match["option"] and _OPTION_B.search(masked):
            continue
        skipped = (_BLANK_LINE if match["hashes"] else _BLANK).match(masked, position)
        start = skipped.end() if skipped else position
        sentence_end = _SENTENCE_END.search(masked, start)
        end = sentence_end.start() if sentence_end else len(masked)
        heading = match["hashes"] and _HEADING.match(masked, start)
        if not heading and not masked.startswith("?", end):
            yield start, end, bool(match["answer"]) and match[0].rstrip("*_ ").endswith((":", "\n"))


def _last_value(text: str, masked: str, start: int) -> str | None:
    """The value of the last sentence after ``start`` that has one, unless it is qualified or withdrawn."""
    ends = [start, *(match.end() for match in _SENTENCE_END.finditer(masked, start)), len(masked)]
    for begin, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
        begin = max(begin, end - _MAX_SENTENCE)
        sentence = text[begin:end].rstrip(" .!?\n")
        values = _values(sentence, _masked(sentence))
        if values and masked[end - 1 : end] != "?" and masked[end - 2 : end - 1] != "?":
            previous = text[max(0, text.rfind("\n", 0, max(0, begin - 1)) + 1) : begin]
            if _BARE.fullmatch(previous) and _BARE.fullmatch(sentence):
                return None  # one value a line is a list
            start_of_line = begin + len(sentence) - len(sentence.lstrip())
            doubted = _RETRACTED.search(masked[end:]) or (
                values[0].start + begin == start_of_line and _is_qualified(text, start_of_line, end)
            )
            return None if doubted else _read(sentence, values, explicit=False) or None
    return None


def _read_statement(sentence: str) -> str | None:
    """The value of an explicit statement; ``""`` if it has no single value, None if there is no statement."""
    sentence = re.sub(r"^<([^<>]+)>$", r"\1", sentence.strip(_MARKUP))
    if _ANNOUNCES.fullmatch(sentence):
        return None
    masked = _masked(sentence)
    values = _values(sentence, masked)
    if not _PROSE.search(masked):
        first, *others = values or [_Value(0, len(sentence), stated=False, adjunct=False)]
        repeated = first.start == 0 and all(_repeats(sentence, masked, first, other) for other in others)
        return _plain(sentence, masked, 0, first.end if others and repeated else len(sentence))
    if values:
        return _read(sentence, values, explicit=True)
    return _words(sentence)


def _words(sentence: str) -> str | None:
    """``even`` of ``the function is even``; the sentence if it has no such subject."""
    subject, *rest = _COPULA.split(sentence, maxsplit=1)
    words = rest[0] if rest and not _NO_SUBJECT.search(subject) else sentence
    words = _OPTION.sub("", words)
    return words.strip() if len(words.split()) <= _MAX_WORDS else None


def _values(sentence: str, masked: str) -> list[_Value]:
    """The values in a sentence; ordinals and names (``$n$``, ``$f(x)$``) only if there are no others."""
    values: list[_Value] = []
    others: list[_Value] = []
    position = 0
    while match := _VALUE.search(masked, position):
        start, position = match.span()
        before = masked[max(0, start - _WINDOW) : start]
        if _NUMBERED.search(before):
            continue
        ordinal = _ORDINAL.search(match[0])
        while operation := _OPERATION.match(masked, position):
            position = operation.end()
        end = position - 2 if ordinal else position
        value = _Value(start, end, bool(_IS.search(before)), bool(_ADJUNCT.search(before)))
        name = match[0][0] == _MASK and _NAME.fullmatch(_plain(sentence, masked, start, end))
        if not name or _SAID.search(before):
            (others if ordinal else values).append(value)
        elif value.stated or start == 0:
            others.append(value)
    return values or others


def _read(sentence: str, values: list[_Value], *, explicit: bool) -> str:
    """The value that a sentence states, or ``""`` if it is denied, bounded, one of several or in doubt.

    ``explicit``: the sentence is a statement of the answer; in other sentences the last value counts.
    """
    masked = _masked(sentence)
    value = _chosen(masked, values, explicit)
    verb = max((match.end() for match in _VERB.finditer(masked)), default=0)
    operand = value is not None and bool(_OPERAND.search(masked, 0, value.start))
    side = value is not None and verb > 0 and bool(_LETTER.search(masked, verb, value.start))
    if operand or side or _COMMAND.search(masked):  # an expression counts as a whole or not at all
        whole = verb and not _PROSE.search(masked, verb) and not _DENIED.search(masked[:verb][-_QUALIFIER_WINDOW:])
        return _plain(sentence, masked, verb, len(sentence)) if whole else ""
    if value is None or _is_qualified(sentence, value.start, value.end) or _STARTS_WITH_OR.match(masked):
        return ""
    if _DENIED.search(masked[: value.start][-_QUALIFIER_WINDOW:]):
        return ""
    if not _PROSE.search(masked) and not any(each.stated for each in values) and "\\\\" not in sentence:
        return _plain(sentence, masked, 0, len(sentence))
    text, end = _with_unit(sentence, masked, value)
    if value.stated and not _PROSE.search(masked, value.start):
        opened = value.start - len(masked[: value.start].rstrip("(["))
        text = _plain(sentence, masked, value.start - opened, len(sentence))
    else:
        asides = [match.span() for match in _ASIDE.finditer(masked, end)]
        others = [v for v in values if v.start >= end and not any(low < v.start < high for low, high in asides)]
        explained = all(_is_explained(sentence, masked, end, value, other) for other in others)
        if not explained or _HEDGED.search(masked[end:]):
            return ""
    subject = _VARIABLE_IS.fullmatch(masked[: value.start])
    variable = _plain(sentence, masked, *subject.span(1)) if subject else ""
    if _VARIABLE.fullmatch(variable) and _NUMBER_ALONE.fullmatch(text):
        return f"{variable}={text}"
    return text


def _chosen(masked: str, values: list[_Value], explicit: bool) -> _Value | None:
    """The value that a sentence is about, or None if it is ambiguous."""
    if explicit and _leads(masked):
        value = values[0]
        for other in values[1:]:  # 2 cars * 3 seats = 6 seats
            between = masked[value.end : other.start]
            if other.stated and not _OTHER.search(between) and not _REMARK.search(between):
                value = other
        return value
    begin = max((match.end() for match in _CONCLUDES.finditer(masked, 0, values[-1].start)), default=0)
    clause = [value for value in values if value.start >= begin]
    subordinate = _SUBORDINATE.match(masked, begin)
    core = clause if subordinate else _before(_REASON, masked, clause)
    stated = [value for value in core if value.stated] or [value for value in clause if value.stated]
    if not stated and not subordinate:
        core = _before(_REMARK, masked, clause)
    candidates = stated or [value for value in core if not value.adjunct] or core
    value = candidates[-1]
    before = [other for other in core if other.start < value.start]
    if before and _OR.search(masked, before[-1].end, value.start):
        return None
    if len(candidates) > 1 and (
        _LIST.fullmatch(masked, candidates[-2].end, value.start) or len(_CONDITION.findall(masked)) > 1
    ):
        return None
    for other in candidates[:-1]:
        between = masked[other.end : value.start]
        if _OR.search(between) or (explicit and not subordinate and (not stated or _OTHER.search(between))):
            return None
    return value


def _before(remark: re.Pattern[str], masked: str, values: list[_Value]) -> list[_Value]:
    cut = remark.search(masked, values[0].end)
    return [value for value in values if cut is None or value.start < cut.start()]


def _leads(masked: str) -> bool:
    return bool(_VALUE.match(masked, len(masked) - len(masked.lstrip(_MARKUP + "(="))))


def _is_explained(sentence: str, masked: str, start: int, value: _Value, other: _Value) -> bool:
    """Whether a later value belongs to a reason or remark and is no second answer."""
    between = masked[start : other.start]
    joint = max((match.end() for match in _JOINS.finditer(between)), default=None)
    reason = _EXPLAINED.search(between) if joint is None else _BECAUSE.search(between, joint)
    if reason or _SAYS_MORE.match(masked, other.end):
        return True
    return _repeats(sentence, masked, value, other)


def _repeats(sentence: str, masked: str, value: _Value, other: _Value) -> bool:
    r"""Whether another value begins with the stated one: ``$42$, $42 = 6\cdot 7$``."""
    stated, repeated = (_plain(sentence, masked, each.start, each.end) for each in (value, other))
    return re.match(re.escape(stated) + r"(?![\d.,])", repeated) is not None


def _with_unit(sentence: str, masked: str, value: _Value) -> tuple[str, int]:
    """A value with its unit, percent sign or "million", and where that ends.

    Words that change the number (``5 dozen``) are kept, so that the result is not the number alone.
    """
    text, end = _plain(sentence, masked, value.start, value.end), value.end
    if more := _PERCENT.match(masked, end) or _SCALE.match(masked, end):
        return text + more[0], more.end()
    words: list[re.Match[str]] = []
    while len(words) < _MAX_UNIT_WORDS and (word := _WORD.match(masked, words[-1].end() if words else end)):
        words.append(word)
    changed = _CHANGED.match(masked, end)
    if not changed and (not words or words[0][1].lower() in _NEUTRAL):
        return text, end
    name = words[0][1].rstrip(".") if words else ""
    if changed or not (leaves_value(name) or _names_unit(name)):
        return sentence[value.start :], len(sentence)
    for count in range(len(words), 0, -1):
        unit = " ".join(word[1] for word in words[:count])
        if _names_unit(unit):
            return rf"{text}\text{{ {unit}}}", words[count - 1].end()
    return text, words[0].end()


def _names_unit(words: str) -> bool:
    return read_unit(words, spaced=True, several=False, behind_number=True) not in (None, COUNTED, UNNAMED)


def _plain(sentence: str, masked: str, start: int, end: int) -> str:
    """A part of a sentence; the content of the formula if it is one."""
    text = sentence[start:end].strip(_MARKUP)
    formula = _FORMULA.fullmatch(text)
    if formula is None:
        return text
    return _LABEL.sub("", _inside(formula)).strip()


_QUALIFIER_WINDOW = 80  # characters on either side that are searched

_RESULT = r"(?:so|is|are|equals|gets?|gives?|makes?|leaves?|then|hence|thus|therefore|but)\b"
_BEFORE = re.compile(
    rf"""(?:
        (?:\b(?:not|never|cannot|neither|nor|except)\b | n['’]t\b | \b(?:anything|everything|all)\s+but\b)
            (?:\s+(?!{_RESULT})[^\W\d]+){{0,3}}                 # cannot possibly be 6, is not equal to 6
      | \b(?:than(?:\s+or\s+equal\s+to)? | instead\s+of | at\s+(?:least|most) | up\s+to
            | above | below | under | over | beyond | exceed(?:s|ing)?)
      | \b(?:twice|double|triple|(?:half|halves|thirds?|quarters?|root|square|cube|logarithm|log|factorial|reciprocal
            |inverse|multiples?|divisors?|factors?|powers?|percent)\s+of) | %\s+of
      | (?<![-=<>])[<>]=? | != | \\(?:n?leq?|n?geq?|[lg]t|neq?|neg|pm)     # x \neq 6, > 6; no arrows
      | \d[^\w.;:!?\n]{{0,3}}\s*(?<!\\)\b(?:or|to|and|through|versus|vs)\b(?:\s+(?:even|maybe|perhaps|possibly|rather))?
    )[\s$*\\(\[]*$""",
    re.VERBOSE | re.IGNORECASE,
)
_AFTER = re.compile(
    r"""^[\s$*\\)\]]*(?:
        (?:is|was|are|were|be|being|seems|looks)(?:n['’]t\b | \s+(?:\w+\s+)?(?:not|wrong|incorrect|false|impossible)\b)
      | (?:can|could|does|do|will|would|must)(?:not\b | n['’]t\b | \s+not\b)
      | or\s+(?:more|less|fewer|above|below|over|under|higher|lower|greater|larger|smaller)\b
    )""",
    re.VERBOSE | re.IGNORECASE,
)
# A clause that denies what follows: "it is false that x is 5", "I do not think that it is 5".
_DENIED = re.compile(
    r"""(?:\b(?:not|never|cannot|false|wrong|incorrect|untrue|doubt\w*|unlikely|impossible)\b | n['’]t\b)[^,;:.]*
        \b(?:that|think|believe|say|claim|mean|sure|certain|if|whether|true|case|correct)\b
        (?:(?!\b(?:so|hence|thus|therefore|then|but)\b)[^,;:.])*$
      | \b(?:wrong|incorrect|false|untrue)\s+(?:answer|value|result|solution)\b[^,;:.]*$""",
    re.VERBOSE | re.IGNORECASE,
)
_HEDGED = re.compile(
    r"""\b(?:or\s+(?:even|rather|else|more|less|fewer) | maybe | perhaps | possibly | alternatively | unless | if
        | otherwise | either | neither | (?:could|might|may)\s+(?:also\s+)?be
        | also\s+(?:possible|correct|right|valid|works?|a\s+solution) | another\s+(?:answer|solution|possibility|option)
        | as\s+well\s+as | along\s+with | (?:a|my|just)\s+guess
        | not\s+(?:sure|certain|right|correct|true|it\b|the\s+(?:right|correct|answer)))\b
      | \b(?:is|are|was|be|seems|looks)\s+(?:\w+\s+)?(?:wrong|incorrect|false|impossible)\b
      | n['’]t\s+(?:right|correct|true|it|the\s+(?:right|correct|answer))\b""",
    re.VERBOSE | re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"""(?:^|[.!?\n])[\s*_]*(?:
        (?:(?:oh|but|hmm+|no)\s*[,.]?\s*)*(?:wait|actually|no\s*[,.]|correction|sorry|oops|scratch\s+that|i\s+mean
            |on\s+second\s+thought|alternatively|or(?!\s+(?:equivalently|simply|more\s+precisely|in)\b))\b
      | (?:this|that|it|the\s+(?:above\s+)?answer)
            (?:\s+(?:is|was|must\s+be|seems))(?:n['’]t|\s+(?:\w+\s+)?(?:wrong|incorrect|false|not)\b)
    )""",
    re.VERBOSE | re.IGNORECASE,
)


def _is_qualified(text: str, start: int, end: int) -> bool:
    """Whether ``text[start:end]`` is denied (``not 6``), a bound (``more than 6``) or one of several (``5 or 6``)."""
    before, after = text[max(0, start - _QUALIFIER_WINDOW) : start], text[end : end + _QUALIFIER_WINDOW]
    return bool(_BEFORE.search(before) or _AFTER.match(after))
