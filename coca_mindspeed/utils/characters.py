"""The characters of texts that are compared: what looks the same is the same."""

import re
import unicodedata
from functools import lru_cache

# Soft hyphens, zero-width spaces and joiners, directions, variation selectors; not tags, which tell flags apart.
_INVISIBLE = re.compile("[\u00ad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
# In NFKC x² is x2, and 2½ is 21/2.
_OWN_MEANING = re.compile(r"<(?:super|sub|fraction)>")


def compatible(text: str) -> str:
    """Return a text without invisible characters, its letters, digits and signs in compatibility form (NFKC).

    Raised and lowered characters, fractions, and accents without a letter stay as they are.
    """
    return text if text.isascii() else "".join(map(compatible_character, without_invisible(text)))


def without_invisible(text: str) -> str:
    return _INVISIBLE.sub("", text)


@lru_cache(maxsize=1 << 13)
def compatible_character(character: str) -> str:
    """Return one character's form in :func:`compatible` text."""
    form = unicodedata.normalize("NFKC", character)
    accent = form.startswith(" ") and form != " "  # ´ is a space with an accent
    return character if accent or _OWN_MEANING.match(unicodedata.decomposition(character)) else form
