"""Ask an OpenAI-compatible server for chat completions, with retries."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay

from coca_mindspeed.utils.console import one_line

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_LONGEST_CONNECT_SECONDS = 5.0
_TRANSIENT_STATUSES = {408, 409, 429, *range(500, 600)}
_SHOWN = 500  # characters of a server's message


class Completion(NamedTuple):
    """A reply; ``tokens`` is None if the server does not count them."""

    text: str
    tokens: int | None
    finish_reason: str | None


class ChatError(Exception):
    """A request without a chat completion.

    Attributes:
        status: HTTP status of the reply; None if there was none, or if it was no chat completion.
        transient: whether another attempt may succeed.
        pause: seconds until the next attempt, where the server names them.
    """

    def __init__(
        self, problem: str, status: int | None = None, *, transient: bool = False, pause: float | None = None
    ) -> None:
        super().__init__(problem)
        self.status, self.transient, self.pause = status, transient, pause


class ChatClient:
    """A client of one event loop.

    Args:
        url: base URL, such as ``http://127.0.0.1:8000/v1``.
        key: None if the server needs none.
        retries: further attempts, with exponential backoff or as the server asks, after connection errors, timeouts,
            the statuses 408, 409, 429 and 5xx, and replies that are no chat completion.
        seconds: timeout of one attempt, until its last byte.
        total_seconds: timeout of all attempts of a request.
    """

    def __init__(
        self, url: str, key: str | None, *, retries: int = 5, seconds: float = 600.0, total_seconds: float = math.inf
    ) -> None:
        import openai  # takes most of a second

        # Its other timeouts are pauses between bytes, which an endless reply keeps short.
        timeout = openai.Timeout(None, connect=_LONGEST_CONNECT_SECONDS)
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeout)
        self._retries, self._seconds, self._total_seconds = retries, seconds, total_seconds

    async def complete(self, request: Mapping[str, Any]) -> Completion:
        """Return the reply to the fields of a request.  Raises ChatError after the last attempt."""
        attempts = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, ChatError) and error.transient),
            wait=_pause,
            stop=stop_after_attempt(self._retries + 1) | stop_before_delay(self._total_seconds),
            retry_error_callback=_give_up,
        )
        return await attempts(self._attempt, request, time.monotonic() + self._total_seconds)

    async def _attempt(self, request: Mapping[str, Any], deadline: float) -> Completion:
        import openai

        reply = self._client.chat.completions.with_raw_response.create(**request)
        limit = min(self._seconds, deadline - time.monotonic())
        try:
            found = await asyncio.wait_for(reply, limit)
        except openai.APIError as error:
            raise _failure(error) from error
        except asyncio.TimeoutError as error:
            raise ChatError(f"no whole reply in {limit:.3g} s", transient=True) from error
        try:
            return _completion(json.loads(found.content))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            problem = f"expected a chat completion, found {found.content[:80]!r} ({error!s:.80})"
            raise ChatError(problem, transient=True, pause=_asked_pause(found.headers)) from None

    async def models(self) -> list[str] | None:
        """Return the server's models; None if it does not list them.

        Raises ChatError if it cannot be reached or refuses the key.
        """
        import openai

        try:
            return [str(model.id) for model in (await self._client.models.list()).data]
        except (openai.APIConnectionError, openai.AuthenticationError) as error:
            raise _failure(error) from error
        except (openai.APIError, AttributeError, TypeError, ValueError, RecursionError):
            return None

    async def close(self) -> None:
        await self._client.close()


def _completion(reply: Any) -> Completion:
    """Read a chat completion; its text is empty where there is none.

    Raises ValueError, TypeError, KeyError, IndexError or AttributeError.
    """
    choice = reply["choices"][0] if reply["choices"] else {"message": {"content": None}}
    text, reason = choice["message"]["content"] or "", choice.get("finish_reason")
    if not isinstance(text, str) or not isinstance(reason, str | None):
        raise TypeError("content and finish_reason should be text")
    tokens = (reply.get("usage") or {}).get("completion_tokens")
    return Completion(text, tokens if type(tokens) is int and tokens >= 0 else None, reason)


def _failure(error: Any) -> ChatError:
    """Describe an error of the client library."""
    if (status := getattr(error, "status_code", None)) is not None:
        pause = _asked_pause(error.response.headers)
        return ChatError(one_line(str(error))[:_SHOWN], status, transient=status in _TRANSIENT_STATUSES, pause=pause)
    return ChatError(one_line(f"{type(error).__name__}: {error} {error.__cause__ or ''}")[:_SHOWN], transient=True)


def _pause(state: RetryCallState) -> float:
    """Seconds until the next attempt."""
    error = None if state.outcome is None else state.outcome.exception()
    if isinstance(error, ChatError) and error.pause is not None:
        return error.pause
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** (state.attempt_number - 1), _LONGEST_PAUSE_SECONDS)


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as given by the server; None if it gives none."""
    for header, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(header, "")) * scale
        except ValueError:  # absent, or a date
            continue
        if 0 <= seconds < math.inf:
            return seconds
    return None


def _give_up(state: RetryCallState) -> NoReturn:
    error = None if state.outcome is None else state.outcome.exception()
    status = error.status if isinstance(error, ChatError) else None
    raise ChatError(f"{error} (attempts: {state.attempt_number})", status) from error
