"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; a second one ends it at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether the user or the cluster has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; signals can only be caught in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for caught, handler in previous.items():
            signal.signal(caught, handler)
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
