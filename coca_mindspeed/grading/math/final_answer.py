r"""From a whole response to its final answer, as text, in time linear in the response.

The trainer's own process runs this on hostile text, so nothing here evaluates anything, and every scan is a single
pass: 100 kB of ``\boxed{`` take milliseconds.
"""

import re
import unicodedata

from coca_mindspeed.grading.math.statements import boxed_statement, stated_answer

# A backslash takes the next character with it, so that \{ and \} are text and not grouping.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Fallbacks look only here: an answer that is not at the end is not a final answer.
_TAIL_CHARACTERS = 2_000

_ZERO_WIDTH = dict.fromkeys(
    [
        0x00AD,
        0x034F,
        0x061C,
        0x180E,
        0x2060,
        0xFEFF,
        *range(0x200B, 0x2010),
        *range(0x202A, 0x202F),
        *range(0x2061, 0x2070),
    ]
)


def _raised_or_lowered(kind: str) -> dict[str, str]:
    """Unicode's small digits and letters of one kind (``super`` or ``sub``), with what they stand for."""
    names = {chr(code): unicodedata.decomposition(chr(code)).split() for code in range(0xB2, 0x2C7E) if code != 0xBA}
    return {
        character: "".join(chr(int(code, 16)) for code in name[1:]).replace("−", "-")
        for character, name in names.items()
        if name[:1] == [f"<{kind}>"]
    }


_SUPERSCRIPTS = str.maketrans(_raised_or_lowered("super"))
_SUPERSCRIPT_RUN = re.compile("[" + "".join(map(chr, _SUPERSCRIPTS)) + "]+")
_SUBSCRIPTS = str.maketrans(_raised_or_lowered("sub"))
_SUBSCRIPT_RUN = re.compile("[" + "".join(map(chr, _SUBSCRIPTS)) + "]+")
_VULGAR_FRACTION = re.compile(r"[¼½¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))")
_SYMBOLS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": r" \times ",
    "·": r" \cdot ",
    "⋅": r" \cdot ",
    "÷": r" \div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≈": r"\approx ",
    "¬": r"\neg ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "。": ".",
    "′": "'",
    "″": "''",
    "‴": "'''",
    # Compatibility forms would make other symbols of these.
    "ℓ": r"\ell ",
    "ℏ": r"\hbar ",
    "ϖ": r"\varpi ",
    "ϑ": r"\vartheta ",
    "ϱ": r"\varrho ",
    **{letter: rf"\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℕℤℚℝℂ"},
}
_SYMBOL = re.compile("[" + "".join(_SYMBOLS) + "]")


def plain_characters(text: str) -> str:
    """Drop characters without width and write full-width digits, superscripts, ``½`` and ``√`` as LaTeX does.

    Superscripts and fractions go first: Unicode's own compatibility form (NFKC) would make ``2`` of ``²`` and
    ``21/2`` of ``2½``.
    """
    if text.isascii():
        return text
    text = text.translate(_ZERO_WIDTH)
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR_FRACTION.sub(lambda m: _latex_fraction(m[0]), text)
    text = _ROOT.sub(lambda m: r"\sqrt{" + (m[1] or m[2] or "") + "}", text)
    text = _SYMBOL.sub(lambda m: _SYMBOLS[m[0]], text)
    return unicodedata.normalize("NFKC", text)


def _latex_fraction(character: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if denominator else character


def _boxes(text: str) -> tuple[list[tuple[int, int]], int | None]:
    r"""Where the content of each complete box starts and ends, by their ends, and of the last that is never closed."""
    if "box" not in text:
        return [], None
    boxes: list[tuple[int, int]] = []
    opened: list[int | None] = []  # per open brace: where its box's content starts, or None for a plain group
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "{":
            opened.append(None)
        elif token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                boxes.append((start, match.start()))
        elif token.endswith("{") and len(token) > 2:
            opened.append(match.end())
    return boxes, next((start for start in reversed(opened) if start is not None), None)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete ``\boxed{...}`` or ``\fbox{...}``; of nested ones, the outermost.

    A box that is never closed (the response was cut off) is no answer, and takes back the complete ones before it,
    unless it repeats the last of them as far as it goes.
    """
    boxes, unclosed = _boxes(text)
    if not boxes:
        return None
    last = text[slice(*boxes[-1])]
    cut_off = unclosed is not None and unclosed > boxes[-1][1]
    return None if cut_off and not last.strip().startswith(text[unclosed:].strip()) else last


def is_cut_off(response: str) -> bool:
    """Whether the last box of a response is never closed, so that it has not said its answer."""
    boxes, unclosed = _boxes(response)
    return unclosed is not None and (not boxes or last_boxed(response) is None)


def without_boxes(text: str) -> str:
    """Content of the last complete box, of the last one inside of that, and so on; without a box, the text."""
    start, end = 0, len(text)
    # By falling ends: the first box that lies within the one before is the last one in it.
    for inner_start, inner_end in reversed(_boxes(text)[0]):
        if start <= inner_start and inner_end <= end:
            start, end = inner_start, inner_end
    return text[start:end]


def final_answer(response: str, boxed_only: bool = False) -> str | None:
    r"""The answer that a response ends in, or None if it gives none.

    In this order: the last complete ``\boxed{}``, or ``<answer>`` behind it; the last statement such as ``#### 5`` or
    "the answer is 5"; the value of the last sentence that has one.  The last two look at the last 2,000 characters
    only, and only if no box was left open: a response that was cut off inside of its box has not said its answer.  A
    value that is denied, bounded, in doubt or one of several is none (:mod:`.qualified`, :mod:`.statements`).

    Args:
        response: the answer segment of a response.
        boxed_only: accept nothing but a box.
    """
    tagged = None if boxed_only else last_tagged(response)
    if tagged is not None:
        response = tagged
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed_statement(plain_characters(boxed).strip()) or None if " " in boxed else boxed.strip() or None
    if boxed_only or is_cut_off(response):
        return None
    tail = plain_characters(response[-_TAIL_CHARACTERS:])
    return stated_answer(tail if tagged is None else f"Answer: {tail}")


def last_tagged(response: str) -> str | None:
    """Content of ``<answer>...</answer>`` where no box stands behind it."""
    opened, closed = response.rfind("<answer>"), response.rfind("</answer>")
    if not 0 <= opened < closed or "\\boxed" in response[closed:] or "\\fbox" in response[closed:]:
        return None
    return response[opened + len("<answer>") : closed]
