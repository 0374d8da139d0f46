"""One spelling of a short fact, an alias or an answer.

Normalisation follows TriviaQA's evaluation: lower case; underscores, punctuation and quotation marks become spaces; the
articles a, an and the are removed. In addition, characters are :func:`~coca_mindspeed.utils.characters.compatible`,
accents and strokes of Latin letters do not count, numbers keep sign, decimal point and bounds (``<5``), commas between
thousands are removed, and short names keep a sign at the end: ``C#``, ``C++``, the blood group ``A-``.
"""

import re
import string
import unicodedata

from coca_mindspeed.utils.characters import compatible

_OTHER_PUNCTUATION = "‘’´`“”„‚«»‹›…•·¡¿—―−" + "。、，！？：；「」『』（）【】《》"
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + _OTHER_PUNCTUATION, " "))
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–", "-"))  # between names, or before a number where - was meant
_THOUSANDS = re.compile(r"(?<![\w.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_DECIMAL = r"(?<![\w.])[0-9]*\.[0-9]+(?!\.?[0-9])"
# The language C++, the key C#, the blood group AB-.
_NAME_WITH_SIGN = r"(?<![^\W_])(?:[a-z]+\+\+|[a-z][#♯+]|ab\+|(?:[abo]|ab)[−-])(?![\w+#])"
_KEPT = re.compile(rf"({_DECIMAL}|{_NAME_WITH_SIGN})")
_SIGN_CHARACTERS = str.maketrans("♯−", "#-")
# Signs that change the following word or number, and their words; not a dash between two words or numbers.
_SIGNS = (
    (re.compile(r"(?:\A\W*|(?<!\w))[-−]\s*(?=[$€£]?\.?[0-9])"), " minus "),
    (re.compile(r"(?<!\w)<(?==?\s*[$€£−-]?\.?[0-9])"), " less than "),
    (re.compile(r"(?<!\w)>(?==?\s*[$€£−-]?\.?[0-9])"), " more than "),
    (re.compile(r"(?<!\w)!(?=[\s=]*\w)|[≠¬]"), " not "),
)
_MAY_HOLD_SIGNS = re.compile(r"[0-9!≠¬+#♯−-]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b(?![+#-])")
# Accents of Latin letters, and letters that do not decompose: whoever writes Asuncion or Lodz means Asunción or Łódź.
_ACCENTS = re.compile(r"(?<=[a-z])[\u0300-\u036f]+")
_STROKES = dict(zip("łøđħŧƀǥɨɍʉƶı", "lodhtbgiruzi", strict=True))
_LETTERS = str.maketrans({**_STROKES, "æ": "ae", "œ": "oe", "ß": "ss"})
# CO₂ is CO2, but 101₂ is not 1012.
_INDEX = re.compile(r"(?:(?<=[^\W\d_])|(?<=\)))[₀-₉]+")


def normalise_fact(text: str) -> str:
    letters = unicodedata.normalize("NFD", compatible(text).lower()).translate(_LETTERS)
    lowered = unicodedata.normalize("NFC", _ACCENTS.sub("", letters)).translate(_DASHES)
    lowered = _INDEX.sub(lambda match: unicodedata.normalize("NFKC", match[0]), lowered)
    plain = _with_numbers_kept(lowered) if _MAY_HOLD_SIGNS.search(lowered) else lowered.translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _with_numbers_kept(text: str) -> str:
    for sign, words in _SIGNS:
        text = sign.sub(words, text)
    pieces = _KEPT.split(without_thousands_commas(text))  # every other one is a decimal number or a name
    pieces[::2] = [piece.translate(_PUNCTUATION) for piece in pieces[::2]]
    pieces[1::2] = [kept.translate(_SIGN_CHARACTERS) if kept[0] != "." else f"0{kept}" for kept in pieces[1::2]]
    return "".join(pieces)


def without_thousands_commas(text: str) -> str:
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
