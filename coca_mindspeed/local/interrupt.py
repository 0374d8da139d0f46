"""Ctrl-C and SIGTERM: save a checkpoint between two steps, elsewhere stop and report what is saved."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from coca_mindspeed.errors import TrainingError


class InterruptedRunError(TrainingError):
    """The run was asked to stop; the message says what is saved and how to continue.

    ``saved`` is the first part of the message, for callers that continue differently.
    """

    exit_code = 130  # as the shell reports Ctrl-C

    def __init__(self, saved: str, go_on: str = "") -> None:
        super().__init__("; ".join(filter(None, (saved, go_on))))
        self.saved = saved


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Set the event at the first SIGINT or SIGTERM instead of stopping; only the main thread can catch signals."""
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
        request.set()
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(saved: str, go_on: str | Callable[[], str] = "") -> Iterator[None]:
    """Raise InterruptedRunError with ``saved`` and ``go_on`` (or its result) on SIGINT or SIGTERM."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedRunError(saved, go_on if isinstance(go_on, str) else go_on()) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)
