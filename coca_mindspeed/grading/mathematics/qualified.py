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


def is_qualified(text: str, start: int, end: int) -> bool:
    """Whether ``text[start:end]`` is denied (``not 6``), a bound (``more than 6``) or one of several (``5 or 6``).

    Args:
        text: of a response, its characters plain.
        start: where the number or formula begins.
        end: where it ends.
    """
    before, after = text[max(0, start - _WINDOW) : start], text[end : end + _WINDOW]
    return bool(_BEFORE.search(before) or _AFTER.match(after))
