"""Where two nested settings differ first, for messages that name one key and not two whole files."""

from collections.abc import Mapping
from typing import Any

Difference = tuple[str, Any, Any]


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], *, under: str = "") -> Difference | None:
    """The dotted key, what stood there before and what stands there now, of the first key in order that differs.

    Args:
        before: nested mappings; a key that one of the two lacks is None there.
        now: the same.
        under: what the keys' names begin with.
    """
    for name in sorted({*before, *now}):
        one, other, key = before.get(name), now.get(name), f"{under}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (found := first_difference(one, other, under=f"{key}.")) is not None:
                return found
        elif one != other:
            return key, one, other
    return None
