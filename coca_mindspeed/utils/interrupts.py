"""Ctrl-C while modules are imported; this module is the first of a command and imports little itself."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def quiet_imports(program: str) -> Iterator[None]:
    """End the process in one line, with exit code 130, at a Ctrl-C while a module is imported.

    A KeyboardInterrupt there would leave modules half imported, and extension modules would print tracebacks of their
    own.  Elsewhere Ctrl-C raises KeyboardInterrupt, as usual.
    """
    inactive = threading.current_thread() is not threading.main_thread()
    if inactive or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    previous = signal.signal(signal.SIGINT, _handler(program))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _handler(program: str) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{program}: interrupted\n".encode())
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    return handle
