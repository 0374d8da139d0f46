"""A queue that passes the items that arrive close together to a function as one batch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_BATCH = 512
GATHERING_SECONDS = 0.02


class GatheringQueue(Generic[Item, Result]):
    """Calls ``function`` with batches of at most 512 items, in one thread, and returns to each caller its result.

    An instance belongs to one event loop.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Result]], name: str) -> None:
        self._function = function
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, item: Item) -> Result:
        """The result for ``item``; raises whatever ``function`` raises for its batch."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await result

    def close(self) -> None:
        """Finish the batch that is being computed."""
        self._thread.shutdown(wait=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if len(self._waiting) < _BATCH:
                await asyncio.sleep(GATHERING_SECONDS)
            taken, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            batch = [pair for pair in taken if not pair[1].done()]  # a caller that failed has cancelled its request
            if not batch:
                continue
            try:
                results = await loop.run_in_executor(self._thread, self._function, [item for item, _ in batch])
            except Exception as failure:  # noqa: BLE001  raised again by each request
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
