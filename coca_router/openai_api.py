"""OpenAI's protocol: pydantic models validate requests; answers, chunks and errors are written.

A parameter that would be ignored, or that would move the confidence from the beginning of the response, is refused by
name. A value that asks for nothing (``null``, ``tools: []``) is accepted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_MESSAGES, MOST_STOPS = 1000, 16
# Parameters that are accepted and ignored, and those that are accepted with these values only.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,), "response_format": ({"type": "text"},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "modalities": (["text"],),
    "logprobs": (False,), "top_logprobs": (0,), "include_stop_str_in_output": (False,),
}  # fmt: skip
# Of earlier answers, which clients send back.
_NEUTRAL_IN_MESSAGES: Mapping[str, Sequence[Any]] = {
    "tool_calls": ([],),
    "annotations": ([],),
    "provider_specific_fields": ({}, {"refusal": None}),  # LiteLLM's
}
# Parameters of tools and response formats, and fields of their messages, which a tier with passthrough gets.
_PASSED = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
_CALLS = ("tool_calls", "tool_call_id")
_THOUGHTS = ("reasoning", "reasoning_content")  # of earlier answers, which the next prompt does without
# Why parameters are refused, and what to do.
_BY_PASSTHROUGH = (
    "the confidence is read from the beginning of a plain answer; a proxy sends such a request on to a tier of "
    "passthrough: true (docs/serving.md), without a confidence"
)
_REASONS = {
    **dict.fromkeys((*_PASSED, "tool_calls", "tool_call_id"), _BY_PASSTHROUGH),
    **dict.fromkeys(("functions", "function_call"), "use tools, which a tier of passthrough: true gets"),
    "n": "a request has one answer, so send it n times; a tier of passthrough: true has one answer too",
    **dict.fromkeys(("logprobs", "top_logprobs"), "log-probs are not sent on, with passthrough neither"),
}
# Values at which a sampling parameter changes nothing.
NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
}  # fmt: skip


@dataclass(eq=False)
class ApiError(Exception):
    """An error in OpenAI's form; ``retry_after`` in seconds."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        # An engine's message may hold lone surrogates.
        message = self.message.encode("utf-8", "backslashreplace").decode("utf-8")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": f"{max(0.0, self.retry_after):.0f}"}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        role = "system" if self.role == "developer" else self.role
        more = {name: value for name, value in (self.model_extra or {}).items() if name in _CALLS and value}
        return {"role": role, "content": content, **more} | ({} if self.name is None else {"name": self.name})

    def has_calls(self) -> bool:
        """Whether it has tool calls, or the result of one."""
        return self.role == "tool" or any((self.model_extra or {}).get(name) for name in _CALLS)


_Stop = Annotated[str, Field(min_length=1)]


class _StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None


class ChatRequest(_Body):
    """The body of ``/v1/chat/completions``."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # engines take 64 bits
    return_token_ids: bool | None = None
    reasoning_effort: str | None = Field(None, min_length=1, max_length=32)

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None: the engine's limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def passed(self) -> dict[str, Any] | None:
        """The parameters of its tools or response format; None for a request without them."""
        given = {name: value for name in _PASSED if (value := (self.model_extra or {}).get(name)) is not None}
        asks = any(given.get(name, neutral[0]) not in neutral for name in _PASSED if (neutral := _NEUTRAL.get(name)))
        return given if asks or any(message.has_calls() for message in self.messages) else None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the client gave, without the seed."""
        values = {name: getattr(self, name) for name in ("temperature", *NEUTRAL_SAMPLING)}
        return {name: value for name, value in values.items() if value is not None}


ModelT = TypeVar("ModelT", bound=BaseModel)


def read_json_body(body: bytes, model: type[ModelT]) -> ModelT:
    """Validate a JSON body; ApiError 400 names the parameter."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if not first["loc"]:
            raise ApiError(400, f"the request's body: {first['msg']}") from error
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        raise ApiError(400, f"{where}: {first['msg']}", param=str(first["loc"][0])) from error


def read_request(body: bytes, served: str, *, thresholds: bool = False, tools: bool = False) -> ChatRequest:
    """Validate a request for the model ``served``; ApiError 400 with the parameter's name, or 404 for another model.

    With ``thresholds``, the model may be called ``NAME@THRESHOLD``; with ``tools``, tools and response formats pass.
    """
    request = read_json_body(body, ChatRequest)
    try:  # pydantic checks the numbers of the fields that it knows; the others are sent on
        to_json([request.model_extra, *(message.model_extra for message in request.messages)])
    except ValueError as error:
        raise ApiError(400, "the request's body: expected finite numbers, found NaN or an infinite one") from error
    for index, message in enumerate(request.messages):
        _refuse_extra(message, f"messages[{index}].", _NEUTRAL_IN_MESSAGES, (*_THOUGHTS, *(_CALLS if tools else ())))
        if (message.role == "tool" and not tools) or (message.content is None and not message.has_calls()):
            raise ApiError(400, f"messages[{index}]: expected a message with a text", param="messages")
    _refuse_extra(request, "", _NEUTRAL, _PASSED if tools else ())
    if request.stream_options is not None:
        _refuse_extra(request.stream_options, "stream_options.", {})
    read_threshold(request.model, served, allowed=thresholds)
    return request


def read_threshold(model: str, served: str, *, allowed: bool = True) -> float | None:
    """The threshold in a model's name such as ``coca@0.2``; None for the plain name, ApiError 404 for another model."""
    if model == served:
        return None
    name, _, text = model.rpartition("@")
    try:
        threshold = float(text)
    except ValueError:
        threshold = -1.0
    if not allowed or name != served or not 0 <= threshold <= 1:
        more = f" ({served}@T answers from confidence T on, 0 to 1)" if allowed else ""
        message = f"model {model!r} is not served here; {served!r} is{more}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return threshold


def _refuse_extra(body: _Body, where: str, neutral: Mapping[str, Sequence[Any]], handled: Sequence[str] = ()) -> None:
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in (*_IGNORED, *handled) and value not in neutral.get(name, ()):
            reason = _REASONS.get(name, "")
            message = f"parameter {where + name!r} is not supported here with this value{reason and f': {reason}'}"
            raise ApiError(400, message, param=where + name, code="unsupported_parameter")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def to_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
