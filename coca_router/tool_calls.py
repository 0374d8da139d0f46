"""Tool calls of an answer, joined from the parts of its chunks.

OpenAI's servers number each call by ``index`` and name its id and function in its first part. Other servers leave out
the number or number all calls alike, send no id or a later one, repeat ids and names, or send arguments as an object.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any


class ToolCalls:
    """The tool calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._latest: dict[int, int] = {}  # the server's number -> the latest call with it

    def add(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Add an entry of ``delta.tool_calls``; return it as OpenAI's servers would send it.

        Raises AttributeError, TypeError or ValueError for an entry of another form, and KeyError if nothing tells its
        call.
        """
        index = None if sent.get("index") is None else int(sent["index"])
        part = {key: value for key, value in sent.items() if key != "index" and value is not None}
        if "function" in part:
            part["function"] = _function(part["function"])
        number = self._continued(index, part)
        if number is None:
            number = len(self._calls)
            self._calls.append({})
        if index is not None:
            self._latest[index] = number
        call = self._calls[number]
        if call.get("id") or not part.get("id"):
            part.pop("id", None)
        if part.get("function", {}).get("name") == call.get("function", {}).get("name"):
            part.get("function", {}).pop("name", None)
        _join(call, part)
        return {"index": number, **part}

    def _continued(self, index: int | None, part: Mapping[str, Any]) -> int | None:
        """The number of the call that a part continues; None for the first part of a call."""
        if index is not None:
            number = self._latest.get(index)
        else:
            same = [
                number for number, call in enumerate(self._calls) if part.get("id") and call.get("id") == part["id"]
            ]
            number = (same or [len(self._calls) - 1])[-1]
            if number < 0:
                if not part.get("id") and not part.get("function", {}).get("name"):
                    raise KeyError("index")
                return None
        return None if number is None or _begins(part, self._calls[number], index is not None) else number

    def missing_ids(self) -> list[dict[str, Any]]:
        """End the answer; return parts with an id for the calls that have none, since a client answers by the id."""
        without = [number for number, call in enumerate(self._calls) if not call.get("id")]
        for number in without:
            self._calls[number]["id"] = f"call_{uuid.uuid4().hex}"
        return [{"index": number, "id": self._calls[number]["id"]} for number in without]

    def whole(self) -> Sequence[Mapping[str, Any]]:
        """The calls of a whole answer."""
        return [{"id": None, "type": "function", **call} for call in self._calls]


def _function(sent: Mapping[str, Any]) -> dict[str, Any]:
    """A function without an empty name, and with arguments as text."""
    function = {key: value for key, value in sent.items() if key != "name" or value}
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        function["arguments"] = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return function


def _begins(part: Mapping[str, Any], call: Mapping[str, Any], numbered: bool) -> bool:
    """Whether a part is of another call than ``call``, although the server numbers both alike or not at all."""
    function, before = part.get("function", {}), call.get("function", {})
    name, arguments = function.get("name"), before.get("arguments")
    if part.get("id") and call.get("id") and part["id"] != call["id"]:
        return bool(name) or not numbered  # some servers draw another id for each part
    if not name or not before.get("name"):
        return False
    if not arguments:  # a numbered call's name may come in parts
        return not numbered and bool(name != before["name"])
    return bool(name != before["name"]) or (bool(function.get("arguments")) and _is_object(arguments))


def _is_object(text: str) -> bool:
    """Whether arguments are complete."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _join(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part's values to a call: names and arguments are continued, other values replaced."""
    for key, value in part.items():
        before = whole.get(key)
        if isinstance(value, dict):
            whole[key] = before if isinstance(before, dict) else {}
            _join(whole[key], value)
        elif key in ("name", "arguments", "input") and isinstance(value, str):
            whole[key] = (before or "") + value
        else:
            whole[key] = value
