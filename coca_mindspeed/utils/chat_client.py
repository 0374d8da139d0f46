"""Ask an OpenAI-compatible server for chat completions, with retries."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay

from coca_mindspeed.algorithm.parsing import END_THINK_TAG
from coca_mindspeed.utils.console import one_line, print_note, without_password

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
_LONGEST_ASKED_SECONDS = 60.0  # openai's client ignores longer ones too
_CONNECT_SECONDS = 5.0
_SHOWN = 500  # characters of a server's message


class Completion(NamedTuple):
    """A reply; ``tokens`` is None if the server does not count them.

    ``thought`` is the text that a reasoning parser of the server has taken out of ``text``.
    """

    text: str
    tokens: int | None
    finish_reason: str | None
    thought: str = ""

    def response(self, thinking: bool) -> str:
        """The whole response; a model without ``thinking`` has its answer in a thought that does not end."""
        ends = thinking and self.thought and self.text
        return f"{self.thought}{END_THINK_TAG}{self.text}" if ends else self.thought + self.text


class ChatError(Exception):
    """A request without a completion; ``status``: of HTTP, or None; ``pause``: seconds that the server asks for."""

    def __init__(self, problem: str, status: int | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(one_line(without_password(problem))[:_SHOWN])
        self.status, self.pause = status, _asked_pause(headers or {})


class ChatClient:
    """A client of one event loop for a base URL such as ``http://127.0.0.1:8000/v1``; ``key`` None: it needs none.

    ``retries``: further attempts, with exponential backoff or as the server asks, after connection errors, timeouts,
    the statuses 408, 409, 429 and 5xx, and replies that are no chat completion.  ``seconds``: timeout of one attempt,
    until its last byte; ``total_seconds``: of all attempts of a request.  ``thoughts``: replies with one so far.
    """

    def __init__(
        self, url: str, key: str | None, *, retries: int = 5, seconds: float = 600.0, total_seconds: float = math.inf
    ) -> None:
        import openai  # takes most of a second

        # Its other timeouts are between bytes, so an endless reply never reaches them.
        timeout = openai.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeout)
        self._retries, self._seconds, self._total_seconds = retries, seconds, total_seconds
        self.thoughts = 0
        self._errors = openai.APIError
        self._fatal_errors = openai.APIConnectionError, openai.AuthenticationError

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Return the reply to a request, given as its fields.  Raises ChatError, of the last attempt."""
        attempts = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=_pause,
            stop=stop_after_attempt(self._retries + 1) | stop_before_delay(self._total_seconds),
            reraise=True,
        )
        return await attempts(self._attempt, request, time.monotonic() + self._total_seconds)

    async def _attempt(self, request: Mapping[str, Any], deadline: float) -> Completion:
        reply = self._client.chat.completions.with_raw_response.create(**request)
        limit = min(self._seconds, deadline - time.monotonic())
        try:
            raw = await asyncio.wait_for(reply, limit)
        except self._errors as error:
            raise _described(error) from error
        except asyncio.TimeoutError as error:
            raise ChatError(f"no whole reply in {limit:.3g} s") from error
        try:
            completion = _completion(json.loads(raw.content))
            self.thoughts += bool(completion.thought)
            return completion
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            problem = f"expected a chat completion, found {raw.content[:80]!r} ({error!s:.80})"
            raise ChatError(problem, headers=raw.headers) from None

    async def models(self) -> list[str] | None:
        """The server's models; None if it lists none.  Raises ChatError if it cannot be reached or refuses the key."""
        try:
            listed = await asyncio.wait_for(self._client.models.list(), self._seconds)
            return [str(model.id) for model in listed.data]
        except self._fatal_errors as error:
            raise _described(error) from error
        except asyncio.TimeoutError as error:
            raise ChatError(f"no whole list of models in {self._seconds:.3g} s") from error
        except (self._errors, AttributeError, TypeError, ValueError, RecursionError):
            return None

    async def close(self) -> None:
        await self._client.close()


def warn_of_thoughts(count: int, thinking: bool) -> None:
    """Say that a server takes answers of a model without ``thinking`` for thoughts; they are read nevertheless."""
    if count and not thinking:
        fix = "serve the model without --reasoning-parser, or add --thinking if it thinks"
        print_note(f"warning: the server sent {count} responses as reasoning, which are read as answers; {fix}")


def _completion(reply: Any) -> Completion:
    """Read a chat completion; its text is empty where there is none."""
    choice = reply["choices"][0] if reply["choices"] else {"message": {"content": None}}
    message, reason = choice["message"], choice.get("finish_reason")
    text, thought = message["content"] or "", message.get("reasoning_content") or message.get("reasoning") or ""
    if not (isinstance(text, str) and isinstance(thought, str)) or not isinstance(reason, str | None):
        raise TypeError("content and finish_reason should be text")
    tokens = (reply.get("usage") or {}).get("completion_tokens")
    return Completion(text, tokens if type(tokens) is int and tokens >= 0 else None, reason, thought)


def _described(error: Any) -> ChatError:
    if (status := getattr(error, "status_code", None)) is not None:
        return ChatError(str(error), status, error.response.headers)
    return ChatError(f"{type(error).__name__}: {error} {error.__cause__ or ''}")


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ChatError) and (error.status in (None, 408, 409, 429) or error.status >= 500)


def _pause(state: RetryCallState) -> float:
    """Seconds until the next attempt."""
    asked = getattr(state.outcome and state.outcome.exception(), "pause", None)
    return (
        min(FIRST_PAUSE_SECONDS * 2.0 ** (state.attempt_number - 1), LONGEST_PAUSE_SECONDS) if asked is None else asked
    )


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as given by the server; None if it gives none or more than a minute."""
    for header, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(header, "")) * scale
        except ValueError:  # absent, or a date
            continue
        if 0 <= seconds <= _LONGEST_ASKED_SECONDS:
            return seconds
    return None
