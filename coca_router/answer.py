"""Write one answer in OpenAI's form, streamed or whole."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coca_router.http_server import Reply
from coca_router.openai_api import ChatRequest, event

Fields = Mapping[str, Any]


class AnswerWriter:
    """Writes an answer; until its first text it can still become an error.

    Attributes:
        text: the text of a whole answer; with ``keep`` also that of a stream.
    """

    def __init__(
        self,
        request: ChatRequest,
        id_: str,
        reply: Reply,
        headers: Callable[[], Mapping[str, str]],
        fields: Callable[[], Fields] = dict,
        *,
        keep: bool = False,
    ) -> None:
        """``headers`` and ``fields`` (of the answer, its first and its last chunk) are read when they are sent."""
        self._reply, self._headers, self._fields = reply, headers, fields
        self._stream = bool(request.stream)
        self._keep, self._counts = keep or not self._stream, request.stream_usage
        kind = f"chat.completion{'.chunk' if self._stream else ''}"
        self._head = {"id": id_, "object": kind, "created": int(time.time()), "model": request.model}
        self._ids: list[int] = []
        self.text = ""

    async def write(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Send text; the first call begins the answer, also with an empty text."""
        if self._keep:
            self.text += text
        if not self._stream:
            self._ids += token_ids
            return
        data = b""
        if not self._reply.begun:
            data = event({**self._object({"delta": {"role": "assistant", "content": ""}}), **self._fields()})
            await self._reply.begin_stream(self._headers())
        if text or token_ids:
            data += event(self._object({"delta": {"content": text}}, token_ids=token_ids))
        if data:
            await self._reply.send(data)

    def discard(self) -> bool:
        """Drop the text so far; False if some of it was sent."""
        if not self._reply.begun:
            self.text = ""
        return not self._reply.begun

    async def end(self, finish_reason: str, prompt_tokens: int, tokens: int) -> None:
        total = prompt_tokens + tokens
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": total}
        if not self._stream:
            message = {"message": {"role": "assistant", "content": self.text, "refusal": None}}
            whole = self._object(message, finish_reason, self._ids)
            await self._reply.json({**whole, "usage": usage, **self._fields()}, self._headers())
            return
        data = event({**self._object({"delta": {}}, finish_reason), **self._fields()})
        if self._counts:
            data += event({**self._head, "choices": [], "usage": usage})
        await self._reply.send(data + b"data: [DONE]\n\n", more=False)

    def _object(
        self, content: Fields, finish_reason: str | None = None, token_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        ids = {"token_ids": list(token_ids)} if token_ids else {}
        return {**self._head, "choices": [choice | ids], **({"usage": None} if self._counts else {})}
