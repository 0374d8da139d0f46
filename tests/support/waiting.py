"""Wait for a condition, with a deadline that a busy machine keeps too; and let time pass without waiting."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds; the test fails if it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.02)


class Clock:
    """``time`` of a module under test, until the test ends: its monotonic clock is ``ahead`` by so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(module, "time", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead
