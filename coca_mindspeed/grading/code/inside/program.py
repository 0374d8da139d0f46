"""The process of the model's program, as an untrusted server of its functions.

Usage: ``program.py REQUESTS_FD ANSWERS_FD``, one JSON object per line. The tests are in another process. The program
can write to both descriptors and replace all code here; see ``remote.py``.
"""

import importlib
import json
import re
import sys
import types
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
values = importlib.import_module("values")

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
    """Names that the program finds defined without importing them, if its source mentions them.

    Functions get names of typing, which decorate signatures; a class ``Solution`` (LeetCode) gets LeetCode's.
    """
    mentioned = set(_NAME.findall(source))
    origins = {**_TYPING, **(_LEETCODE if "Solution" in mentioned else {})}
    names = {name: getattr(importlib.import_module(origins[name]), name) for name in sorted(mentioned & origins.keys())}
    if "Solution" in mentioned:
        names |= {name: importlib.import_module(name) for name in _LEETCODE_MODULES if name in mentioned}
    return names


class Server:
    """Loads the program and answers requests one by one."""

    def __init__(self) -> None:
        self._module = types.ModuleType("program")
        self._objects: list[Any] = []

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        sys.modules["program"] = self._module  # dataclasses look their module up
        names = self._module.__dict__
        provided = names_for(request["source"])
        names.update(provided)
        exec(compile(request["source"], "<program>", "exec"), names)  # noqa: S102  # the sandbox's point
        if (entry_point := request.get("entry_point")) and entry_point not in names:
            solution = names.get("Solution")  # the form in which LeetCode asks for answers
            if isinstance(solution, type) and hasattr(solution, entry_point):
                names[entry_point] = getattr(solution(), entry_point)
        exports = {
            name: self._encode(names[name])
            for name in request["names"]
            if name in names and not (name in provided and names[name] is provided[name])
        }
        return {"exports": exports}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        target = self._objects[request["target"]]
        operation = request["operation"]
        arguments = [values.decode(item, self._objects.__getitem__) for item in request["arguments"]]
        if operation == "call":
            keywords = {k: values.decode(v, self._objects.__getitem__) for k, v in request["keywords"].items()}
            result = target(*arguments, **keywords)
        elif operation == "get":
            result = getattr(target, *arguments)
        elif operation == "set":
            setattr(target, *arguments)
            result = None
        elif operation == "item":
            result = target[arguments[0]]
        elif operation == "length":
            result = len(target)
        elif operation == "truth":
            result = bool(target)
        else:
            result = list(target)
        return {"value": self._encode(result)}

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._reference)

    def _reference(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def main(requests_fd: int, answers_fd: int) -> None:
    server = Server()
    with (
        open(requests_fd, encoding="ascii") as requests,
        open(answers_fd, "w", encoding="ascii") as answers,
    ):  # descriptors
        for line in requests:
            request = json.loads(line)
            try:
                answer = server.load(request) if "source" in request else server.call(request)
            except BaseException as error:  # noqa: BLE001  # exit() and KeyboardInterrupt are the program's, too
                answer = {"error": type(error).__name__, "message": _text(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # noqa: BLE001  # __str__ is the program's as well
        return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
