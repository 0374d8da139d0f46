"""Names and texts from data, made fit for the places where people read them.

A model's name or response may hold anything: terminal escapes, ``[markup]``, ``$math$``.  Shown, all of it is text.
"""

import unicodedata

from rich.text import Text

_KEPT = frozenset("\n\t")
# They reorder what stands beside them, so that a line reads otherwise than it is.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control, half of a pair, line and paragraph separators


def printable(text: str) -> str:
    r"""The text with control characters as escapes (``\x1b``); line ends and tabs stay."""
    # The first is nearly all text, of which a report has tens of thousands of cells.  The text itself comes back, since
    # it may be of a class that says more: markup of a template, for one.
    if (text.isascii() and text.isprintable()) or not any(map(_is_unprintable, text)):
        return text
    return "".join(ascii(c)[1:-1] if _is_unprintable(c) else c for c in text)


def one_line(text: str) -> str:
    """The text as :func:`printable` on one line, runs of white space as single spaces."""
    return printable(" ".join(text.split()))


def terminal_text(text: str) -> Text:
    """Text for rich, which takes plain strings for markup."""
    return Text(printable(text))


def _is_unprintable(character: str) -> bool:
    return character in _REORDERING or (character not in _KEPT and unicodedata.category(character) in _UNPRINTABLE)
