"""Calls of backends that run at once."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from coca_mindspeed.serving.backend_error import BackendError

T = TypeVar("T")


async def side_by_side(*calls: Callable[[], Awaitable[T]]) -> list[T | BackendError]:
    """The results of calls that run at once, or the error of each that failed."""
    results: dict[int, T | BackendError] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except BackendError as error:
            results[index] = error

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(run, index, call)
    return [results[index] for index in range(len(calls))]


def succeeded(results: Sequence[T | BackendError]) -> list[T]:
    """Those that did not fail.

    Raises:
        BackendError: all did; the first one's.
    """
    whole = [result for result in results if not isinstance(result, BackendError)]
    if not whole:
        raise next(result for result in results if isinstance(result, BackendError))
    return whole
