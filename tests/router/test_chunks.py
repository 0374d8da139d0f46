"""An engine's stream: any way of cutting it gives the same chunks."""

import asyncio
import itertools

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_router.backends import Timeout
from coca_router.chunks import BackendError, ChunkReader
from coca_router.openai_api import Envelope
from tests.router.servers_for_tests import event

COUNTED = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'
STREAM = (
    b": a comment\n\n" + event("<confidence>") + event("0.9\r\n").replace(b"\n", b"\r\n") + event("é 🙂")
    + event("", "stop") + COUNTED + b"data: [DONE]\n\n" + event("of nobody")
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_chunks(places):
    edges = sorted({0, len(STREAM), *places})
    reader, chunks, finished_at = ChunkReader("engine"), [], None
    for start, end in itertools.pairwise(edges):
        chunks += reader.feed(STREAM[start:end])
        if reader.finished and finished_at is None:
            finished_at = len(chunks)
    assert [chunk.text for chunk in chunks] == ["<confidence>", "0.9\r\n", "é 🙂", "", ""]
    assert [chunk.tokens for chunk in chunks] == [1, 1, 1, 0, 0]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "stop", None]
    assert chunks[-1].usage == (7, 3)
    assert reader.ended
    assert finished_at in (4, 5)


def test_an_answer_without_its_reason_is_not_finished():
    reader = ChunkReader("engine")
    assert len(list(reader.feed(event("a") + b"data: [DONE]\n\n"))) == 1
    assert (reader.finished, reader.ended) == (False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"choices": [{"delta": {"content": "\xff"}}]}',
        b'{"choices": [{"delta": {"content": 7}}]}',
        b'{"choices": [{"delta": {"content": "a"}, "token_ids": ["b"]}]}',
        b'{"choices": [], "usage": {"prompt_tokens": "7"}}',
        b'{"choices": [{"delta": {"content": "a"}, "finish_reason": 7}]}',
        b"{}",
        b"[" * 100_000,
        b'{"choices": 7}',
        b"7",
    ],
)
def test_an_invalid_event_is_garbage_after_the_chunks_before_it(data):
    read = []
    with pytest.raises(BackendError) as error:
        read.extend(ChunkReader("engine").feed(event("a") + b"data: " + data + b"\n\n" + event("b")))
    assert error.value.kind == "garbage"
    assert [chunk.text for chunk in read] == ["a"]


def test_a_line_without_end_is_garbage():
    reader = ChunkReader("engine")
    assert not list(reader.feed(b"x" * 65536))
    with pytest.raises(BackendError, match="an event of more than"):
        list(reader.feed(b"x" * 2_000_000))


@pytest.mark.parametrize("model", ["coca", "\0", '"\\u0000"', "é", '"'])
@pytest.mark.parametrize("text", ["", " word", "\0", '"', "\\", "\r\n", "é 🙂", "\u2028\x7f", "data: [DONE]\n\n"])
def test_an_event_of_text_alone_is_the_same_by_either_way(text, model):
    envelope = Envelope("chatcmpl-\0", model)
    assert envelope.text_chunks()(text) == envelope.chunk(text)


def test_waits_are_bounded_each_for_itself():
    async def waits(*seconds):
        """Whether waits that would last for ever are ended: each (allowed, lasting), with as much time between them."""
        with anyio.CancelScope() as scope:
            timeout = Timeout(scope)
            for allowed, lasting in seconds:
                timeout.start(allowed)
                await asyncio.sleep(lasting)
                timeout.stop()
                await asyncio.sleep(0.05)  # is nobody's wait, however short the last one was allowed to be
            timeout.close()
        return scope.cancelled_caught, timeout.seconds

    async def all_of_them():
        assert await waits((60, 0), (0.01, 0), (60, 0.05), (60, 0)) == (False, 60)
        # A long wait's timer is running when a short one begins, and the other way round.
        assert await waits((60, 0), (0.02, 3600)) == (True, 0.02)
        assert await waits((0.01, 0), (0.02, 3600)) == (True, 0.02)
        assert await waits((0.02, 3600), (60, 0)) == (True, 0.02)

    asyncio.run(asyncio.wait_for(all_of_them(), 60))
