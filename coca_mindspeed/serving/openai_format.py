"""OpenAI's chat protocol: what is read of a request, and how answers, pieces of answers and errors are written.

A parameter that would be ignored in silence, or that would make the model write something other than a confidence
first, is refused by name.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.json_text import JsonError, parse_json

# Passed on to the engine as they are: kind, least and largest value.
_PASSED_ON: Mapping[str, tuple[type, float, float]] = {
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, -1, 1_000_000),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "seed": (int, -(2**62), 2**62),  # several samples count on from it, and engines take 64 bits
    "priority": (int, -(2**31), 2**31),
    "logit_bias": (dict, -100, 100),
}
_READ = (
    *("model", "messages", "prompt", "stream", "stream_options", "temperature", "max_tokens", "stop"),
    *("max_completion_tokens", "n", "logprobs", "top_logprobs", "include_stop_str_in_output", "return_token_ids"),
)
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
MAX_STOPS = 16


class ApiError(Exception):
    """An error as a client sees it: status, OpenAI's type and code, and when to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        # An engine's own message may be in it, with halves of characters, which UTF-8 cannot hold.
        message = self.message.encode("utf-8", "backslashreplace").decode("utf-8")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` where it is known."""
        return {} if self.retry_after is None else {"retry-after": f"{max(0.0, self.retry_after):.0f}"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks for.

    Attributes:
        model: by the name that is served.
        messages: chat messages; None for a completion of token ids.
        prompt_ids: token ids to go on from; None for a chat.
        stream: whether the answer is sent in pieces.
        usage: whether a last piece counts the tokens.
        max_tokens: of the answer; None: the engine's limit.
        temperature: None: the engine's default, 1.
        stops: texts that end the answer.
        include_stop: whether the text that ended it is part of it.
        log_probs: how many alternatives to each token; None: no log-probs, 0: the sampled token's alone.
        token_ids: whether to return them.
        others: parameters that are passed on as they are.
    """

    model: str
    messages: Sequence[Mapping[str, Any]] | None
    prompt_ids: Sequence[int] | None
    stream: bool
    usage: bool
    max_tokens: int | None
    temperature: float | None
    stops: tuple[str, ...]
    include_stop: bool
    log_probs: int | None
    token_ids: bool
    others: Mapping[str, Any]


def read_ask(body: bytes, *, chat: bool, served: str) -> Ask:
    """Check a request's body.

    Args:
        body: as it came.
        chat: a chat completion; else a completion of token ids.
        served: the model's name here.

    Raises:
        ApiError: 400 with the parameter's name, or 404 for another model.
    """
    try:
        values = parse_json(body.decode("utf-8"))
    except (UnicodeDecodeError, JsonError) as error:
        raise ApiError(400, f"the request's body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the request's body should be a JSON object, found {type(values).__name__}")
    for name in values:
        if name not in (*_READ, *_PASSED_ON, *_WITHOUT_EFFECT) and values[name] is not None:
            raise ApiError(400, f"parameter {name!r} is not supported here", param=name, code="unsupported_parameter")
    model = _typed(values, "model", str, None)
    if model != served:
        raise ApiError(404, f"model {model!r} is not served here; {served!r} is", param="model", code="model_not_found")
    if _typed(values, "n", int, 1) != 1:
        raise ApiError(400, "n: one answer a request", param="n", code="unsupported_parameter")
    limits = [values.get(name) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((limit for limit in limits if limit is not None), None)
    limit = _in_range({"max_tokens": limit}, "max_tokens", int, 1, 1_000_000)
    options = _typed(values, "stream_options", dict, {})
    return Ask(
        model=model,
        messages=_messages(values) if chat else None,
        prompt_ids=None if chat else _prompt_ids(values),
        stream=_typed(values, "stream", bool, False),
        usage=bool(options.get("include_usage", False)),
        max_tokens=limit,
        temperature=_in_range(values, "temperature", float, 0, 2),
        stops=_stops(values),
        include_stop=_typed(values, "include_stop_str_in_output", bool, False),
        log_probs=_log_probs(values, chat),
        token_ids=_typed(values, "return_token_ids", bool, False),
        others={name: _passed_on(values, name) for name in _PASSED_ON if values.get(name) is not None},
    )


def _typed(values: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = values.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "nothing" if value is None else type(value).__name__
        raise ApiError(400, f"{name} should be {kind.__name__}, found {found}", param=name)
    return value


def _passed_on(values: Mapping[str, Any], name: str) -> Any:
    kind, low, high = _PASSED_ON[name]
    if kind is not dict:
        return _in_range(values, name, kind, low, high)
    biases = _typed(values, name, dict, None)
    for token in biases:
        if _in_range(biases, token, float, low, high) is None:
            raise ApiError(400, f"{name}: should give each token a number from {low} to {high}", param=name)
    return biases


def _in_range(values: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool | (float if kind is int else bool)):
        raise ApiError(400, f"{name} should be a number from {low} to {high}", param=name)
    if not low <= value <= high:
        raise ApiError(400, f"{name} should be a number from {low} to {high}", param=name)
    return value


def _messages(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages should be a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant"):
            raise ApiError(400, f"{where} should have a role: system, developer, user or assistant", param="messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
            raise ApiError(400, f"{where}.content should be text", param="messages")
    return [{"role": m["role"].replace("developer", "system"), "content": _content(m["content"])} for m in messages]


def _content(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _prompt_ids(values: Mapping[str, Any]) -> list[int]:
    ids = values.get("prompt")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ApiError(400, "prompt should be a list of token ids; texts belong to chat completions", param="prompt")
    return ids


def _stops(values: Mapping[str, Any]) -> tuple[str, ...]:
    stops = values.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop should be a text or at most {MAX_STOPS} texts, none of them empty", param="stop")
    return tuple(stops)


def _log_probs(values: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:  # completions say it by the number of alternatives
        return None if values.get("logprobs") is None else int(_in_range(values, "logprobs", int, 0, 20))
    if not _typed(values, "logprobs", bool, False):
        return None
    return int(_in_range(values, "top_logprobs", int, 0, 20) or 0)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all pieces of one answer have in common.

    Attributes:
        id: of the request.
        model: as the client named it.
        created: seconds since 1970.
        chat: of a chat; else of a completion.
    """

    id: str
    model: str
    created: int
    chat: bool = True

    @classmethod
    def new(cls, id_: str, model: str, chat: bool = True) -> "Envelope":
        return cls(id_, model, int(time.time()), chat)

    def piece(
        self,
        text: str | None = None,
        *,
        first: bool = False,
        finish_reason: str | None = None,
        choice: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> bytes:
        """One event of a stream; ``choice`` and ``fields`` are added to the choice and to the object."""
        delta = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
        content = {"delta": delta} if self.chat else {"text": text or ""}
        chosen = {"index": 0, **content, "finish_reason": finish_reason, **(choice or {})}
        return event(self._object(".chunk" if self.chat else "", [chosen], fields))

    def text_pieces(self) -> Callable[[str], bytes]:
        """Writes events of nothing but text, as :meth:`piece` does; what they have in common is written once."""
        head, _, tail = self.piece("\0").rpartition(to_json("\0"))
        return lambda text: head + to_json(text) + tail

    def usage_piece(self, usage: Mapping[str, Any]) -> bytes:
        """The last event, which counts tokens and has no choice."""
        return event(self._object(".chunk" if self.chat else "", [], {"usage": usage}))

    def whole(
        self, text: str, finish_reason: str, usage: Mapping[str, Any], choice: Mapping[str, Any] | None, **fields: Any
    ) -> dict[str, Any]:
        """A whole answer."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        chosen = {"index": 0, **content, "finish_reason": finish_reason, **(choice or {})}
        return self._object("", [chosen], {"usage": usage, **fields})

    def _object(self, suffix: str, choices: list[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **fields}


DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; it has no NaN."""
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's count of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
