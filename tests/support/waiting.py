"""Wait for a condition, with a deadline that a busy machine keeps too."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds; the test fails if it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.02)
