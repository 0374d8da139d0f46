"""Whether the words around a number say that it is the answer, or that it is not, or only bounds or accompanies it."""

import re

_WINDOW = 80  # characters on either side; a word further off is about something else

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
# A clause that says of what follows that it is not so: "it is false that x is 5", "I do not think that it is 5".
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


def is_denied(before: str) -> bool:
    """Whether the clause that leads to a value denies the whole statement (``it is false that x is``)."""
    return bool(_DENIED.search(before[-_WINDOW:]))


def is_hedged(after: str) -> bool:
    """Whether the rest of the sentence makes a condition or a guess of a value, or takes it back."""
    return bool(_HEDGED.search(after))


def is_retracted(following: str) -> bool:
    """Whether a later sentence takes the answer back or starts anew (``Wait, ...``)."""
    return bool(_RETRACTED.search(following))


def is_qualified(text: str, start: int, end: int) -> bool:
    """Whether ``text[start:end]`` is denied (``not 6``), a bound (``more than 6``) or one of several (``5 or 6``).

    Args:
        text: of a response, its characters plain.
        start: where the number or formula begins.
        end: where it ends.
    """
    before, after = text[max(0, start - _WINDOW) : start], text[end : end + _WINDOW]
    return bool(_BEFORE.search(before) or _AFTER.match(after))
