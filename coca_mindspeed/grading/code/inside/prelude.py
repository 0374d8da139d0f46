"""Names that a program finds defined without importing them.

Functions get names of typing, which decorate signatures. A class ``Solution`` (LeetCode) gets LeetCode's usual names.
"""

import importlib
import re
from typing import Any

_NAME = re.compile(r"[A-Za-z_]\w*")

_TYPING = dict.fromkeys(
    (
        "Any", "Callable", "DefaultDict", "Deque", "Dict", "FrozenSet", "Generator", "Generic", "Hashable", "Iterable",
        "Iterator", "List", "Literal", "Mapping", "MutableMapping", "NamedTuple", "Optional", "Sequence", "Set",
        "Sized", "Tuple", "Type", "TypeVar", "Union",
    ),
    "typing",
)  # fmt: skip
_LEETCODE = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    **dict.fromkeys(("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "nlargest", "nsmallest"), "heapq"),
    **dict.fromkeys(("bisect_left", "bisect_right", "insort"), "bisect"),
    **dict.fromkeys(("cache", "cmp_to_key", "lru_cache", "reduce"), "functools"),
    **dict.fromkeys(
        ("accumulate", "chain", "combinations", "groupby", "pairwise", "permutations", "product", "zip_longest"),
        "itertools",
    ),
    **dict.fromkeys(("ceil", "comb", "factorial", "floor", "gcd", "inf", "isqrt", "lcm", "log2", "sqrt"), "math"),
}
_LEETCODE_MODULES = (
    "bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
)  # fmt: skip


def names_for(source: str) -> dict[str, Any]:
    """The provided names that the source mentions; it may define any of them itself."""
    mentioned = set(_NAME.findall(source))
    origins = {**_TYPING, **(_LEETCODE if "Solution" in mentioned else {})}
    names = {name: getattr(importlib.import_module(origins[name]), name) for name in sorted(mentioned & origins.keys())}
    if "Solution" in mentioned:
        names |= {name: importlib.import_module(name) for name in _LEETCODE_MODULES if name in mentioned}
    return names
