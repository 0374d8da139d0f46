"""Find the final answer of a response, as text, in time linear in the response.

This runs in the trainer's process on untrusted text: nothing is evaluated, and every scan is a single pass.
"""

import re
import unicodedata

from coca_mindspeed.grading.math.statements import boxed_statement, stated_answer
from coca_mindspeed.grading.math.words import is_words

# A backslash takes the next character with it, so that \{ and \} are text and not grouping.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Fallbacks look only here: an answer that is not at the end is not a final answer.
_TAIL_CHARACTERS = 2_000
_LETTER = re.compile(r"[A-Za-z]\.?")
_MAX_WORDS_CHARACTERS = 200

_ZERO_WIDTH = dict.fromkeys(map(ord, "\u00ad\u034f\u061c\u180e\u2060\ufeff")) | dict.fromkeys(
    code for first, last in ((0x200B, 0x200F), (0x202A, 0x202E), (0x2061, 0x206F)) for code in range(first, last + 1)
)


def _raised_or_lowered(kind: str) -> dict[str, str]:
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
_COMMANDS = """× times; · cdot; ⋅ cdot; ÷ div; π pi; ∞ infty; ≤ le; ≥ ge; ≈ approx; ¬ neg; ≠ ne; ∪ cup; ∩ cap
∅ emptyset; ∈ in; ± pm; ℓ ell; ℏ hbar; ϖ varpi; ϑ vartheta; ϱ varrho"""
_SYMBOLS = {"−": "-", "–": "-", "—": "-", "°": r"^\circ ", "。": ".", "′": "'", "″": 2 * "'", "‴": 3 * "'"}
_SYMBOLS |= {letter: rf"\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℕℤℚℝℂ"}
for _entry in _COMMANDS.replace("\n", ";").split(";"):
    _sign, _name = _entry.split()
    _SYMBOLS[_sign] = rf" \{_name} " if _name in ("times", "cdot", "div") else rf"\{_name} "
_SYMBOL = re.compile("[" + "".join(_SYMBOLS) + "]")


def plain_characters(text: str) -> str:
    """Drop zero-width characters and write full-width digits, superscripts, ``½`` and ``√`` as LaTeX.

    Superscripts and fractions are replaced before NFKC, which would turn ``²`` into ``2`` and ``2½`` into ``21/2``.
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
    """Start and end of the content of each complete box, by their ends, and the start of the last unclosed one."""
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

    An unclosed box after it means that the response was cut off: None, unless that box repeats the last one so far.
    """
    boxes, unclosed = _boxes(text)
    if not boxes:
        return None
    last = text[slice(*boxes[-1])]
    cut_off = unclosed is not None and unclosed > boxes[-1][1]
    return None if cut_off and not last.strip().startswith(text[unclosed:].strip()) else last


def is_cut_off(response: str) -> bool:
    boxes, unclosed = _boxes(response)
    return unclosed is not None and (not boxes or last_boxed(response) is None)


def without_boxes(text: str) -> str:
    """Content of the innermost last box; the text if there is none."""
    start, end = 0, len(text)
    # By falling ends: the first box that lies within the one before is the last one in it.
    for inner_start, inner_end in reversed(_boxes(text)[0]):
        if start <= inner_start and inner_end <= end:
            start, end = inner_start, inner_end
    return text[start:end]


def final_answer(response: str, boxed_only: bool = False) -> str | None:
    r"""Return the final answer of a response (without its confidence), or None.

    In this order: the last complete ``\boxed{}``, or ``<answer>`` after it; the last statement such as ``#### 5`` or
    "the answer is 5"; the value of the last sentence that has one (:mod:`.statements`); the whole response if it is
    words ("Athens") or one letter. All but the first read the last 2,000 characters only, and only if no box was left
    open.
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
    stated = stated_answer(tail if tagged is None else f"Answer: {tail}")
    whole = response.strip()
    if stated is None and len(whole) <= _MAX_WORDS_CHARACTERS and (is_words(whole) or _LETTER.fullmatch(whole)):
        return whole
    return stated


def last_tagged(response: str) -> str | None:
    """Content of ``<answer>...</answer>`` if no box follows it."""
    opened, closed = response.rfind("<answer>"), response.rfind("</answer>")
    if not 0 <= opened < closed or "\\boxed" in response[closed:] or "\\fbox" in response[closed:]:
        return None
    return response[opened + len("<answer>") : closed]
