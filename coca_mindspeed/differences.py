"""Where two nested settings differ first, for messages that name one key and not two whole files."""

from collections.abc import Mapping
from typing import Any

Difference = tuple[str, Any, Any]


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], *, among_common: bool = False, under: str = ""
) -> Difference | None:
    """The dotted key, what stood there before and what stands there now, of the first key in order that differs.

    Args:
        before: nested mappings.
        now: the same.
        among_common: leave out keys that one of the two lacks; otherwise they are None there.
        under: what the keys' names begin with.
    """
    for name in sorted({*before, *now}):
        if among_common and not (name in before and name in now):
            continue
        one, other, key = before.get(name), now.get(name), f"{under}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (found := first_difference(one, other, among_common=among_common, under=f"{key}.")) is not None:
                return found
        elif one != other:
            return key, one, other
    return None
