"""Chunks of an answer from the server-sent events of an OpenAI-compatible engine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

_MAX_EVENT = 1 << 20  # bytes
_FAILED = ("abort", "aborted", "error", "cancelled")  # finish reasons of an incomplete answer


class BackendError(Exception):
    """A backend did not give a whole answer.

    Attributes:
        kind: ``unreachable``, ``timeout``, ``busy`` (429), ``rejected`` (an error in the request), ``failed`` (an error
            of the engine, or a wrong key), ``garbage`` (unknown protocol) or ``cut`` (it ended before the answer).
        retry_after: seconds, where the backend named them.
    """

    Kind = Literal["unreachable", "timeout", "busy", "rejected", "failed", "garbage", "cut"]

    def __init__(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


class Chunk(NamedTuple):
    """A chunk of an answer.

    Attributes:
        tokens: number of tokens; where the engine names no ids, 1 for a chunk with text.
        token_ids, prompt_ids: None where the engine names none; those of the prompt are in one chunk.
        token_bytes: of its tokens, where log-probs were asked for.
        usage: (prompt, completion) tokens, in one chunk, where the engine counts them.
        finish_reason: of the last chunk with text; None before.
    """

    text: str
    tokens: int
    token_ids: tuple[int, ...] | None
    token_bytes: tuple[bytes, ...]
    prompt_ids: tuple[int, ...] | None
    usage: tuple[int, int] | None
    finish_reason: str | None

    @property
    def progresses(self) -> bool:
        """Whether it holds more than a role or an empty text, which engines also send to keep a connection open."""
        return self.tokens > 0 or self.finish_reason is not None or self.usage is not None


def parse_chunk(value: Mapping[str, Any]) -> Chunk:
    """The chunk in an event's JSON object.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: it holds none.
    """
    choice = value["choices"][0] if value["choices"] else {}
    delta = choice.get("delta") or {}
    text = delta.get("content") or choice.get("text") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    reason = choice.get("finish_reason")
    if not isinstance(text, str) or not isinstance(reason, str | None):
        raise TypeError("text and finish reason should be text")
    ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids", value.get("prompt_token_ids"))
    log_probs = (choice.get("logprobs") or {}).get("content") or ()
    return Chunk(
        text=text,
        tokens=len(ids) if ids is not None else int(bool(text or thought)),
        token_ids=None if ids is None else tuple(map(int, ids)),
        token_bytes=tuple(
            bytes(entry["bytes"]) if entry.get("bytes") is not None else str(entry["token"]).encode()
            for entry in log_probs
        ),
        prompt_ids=None if prompt_ids is None else tuple(map(int, prompt_ids)),
        usage=_usage(value.get("usage")),
        # Engines also write "" or "null" before the end of the answer.
        finish_reason=None if reason in (None, "", "null") else reason,
    )


def _usage(value: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not value:
        return None
    counts = value.get("prompt_tokens") or 0, value.get("completion_tokens") or 0
    if not all(type(count) is int and count >= 0 for count in counts):
        raise TypeError("counts of tokens should be whole numbers")
    return counts


class ChunkReader:
    """Chunks from the bytes of an event stream, however they are cut.

    Attributes:
        finished: whether a chunk named a finish reason, so that the answer is whole.
        ended: whether no further chunk of the answer follows.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # of the backend, for errors
        self._held, self._surrogate = b"", ""
        self._data: list[bytes] = []
        self._after_cr = False
        self.finished = self.ended = False

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Yield the chunks that are complete.

        Raises:
            BackendError: an event is no chunk, or reports an error of the engine.
        """
        if self._after_cr and received.startswith(b"\n"):
            received = received[1:]
        self._after_cr = received.endswith(b"\r")
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._held = (self._held + received).split(b"\n")
        if len(self._held) + sum(map(len, self._data)) > _MAX_EVENT:
            raise self._garbage(f"an event of more than {_MAX_EVENT} bytes")
        for line in lines:
            if self.ended:
                return
            if not line:
                yield from self._event()
            elif line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    yield from self._event()
                    self.ended = True
                else:
                    self._data.append(data)

    def close(self) -> Iterator[Chunk]:
        """Yield the chunk of a last event that no blank line followed."""
        return self.feed(b"\n\n")

    def _event(self) -> Iterator[Chunk]:
        data, self._data = self._data, []
        try:
            for value in _values(data):
                if value.get("error"):
                    raise BackendError("failed", f"backend {self._name} failed in the middle of an answer")
                yield self._checked(parse_chunk(value))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise self._garbage("an event that is no chunk of an answer") from error

    def _checked(self, chunk: Chunk) -> Chunk:
        if chunk.finish_reason in _FAILED:
            raise BackendError("failed", f"backend {self._name} aborted the answer ({chunk.finish_reason})")
        if self._surrogate or not chunk.text.isascii():
            chunk = chunk._replace(text=self._join_surrogates(chunk))
        self.finished = self.finished or chunk.finish_reason is not None
        self.ended = self.finished and chunk.usage is not None
        return chunk

    def _join_surrogates(self, chunk: Chunk) -> str:
        r"""Join surrogates that the engine split over two chunks (``\ud83d`` and ``\ude42``)."""
        text, self._surrogate = self._surrogate + chunk.text, ""
        if text and "\ud800" <= text[-1] <= "\udbff" and chunk.finish_reason is None:
            text, self._surrogate = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")

    def _garbage(self, found: str) -> BackendError:
        return BackendError("garbage", f"backend {self._name} sent {found}")


def _values(data: Sequence[bytes]) -> list[Any]:
    """The JSON of an event; of several, where an engine ends each by one line end instead of two."""
    if len(data) > 1:
        try:
            return [_json(b"\n".join(data))]
        except ValueError:
            pass
    return [_json(line) for line in data]


def _json(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return json.loads(data)  # accepts a lone surrogate
