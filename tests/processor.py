"""Bounds of processor time that hold on any machine: what the processor does at this moment is measured beside them."""

import time

# What `_work` took where the bounds were set: one core of a Xeon at 2.5 GHz with nothing beside it.
_REFERENCE_SECONDS = 0.05


def _work() -> None:
    text = "a word, 12 and {more} of it; " * 40
    for n in range(1_600):
        sum(ord(c) for c in text[:400]) + len(text.replace("{", str(n)).split())


def within(seconds: float, bound: float) -> bool:
    """Whether processor time keeps a bound of the machine where it was set, as seconds of this one, never fewer.

    Call it beside the work that is bounded: a core that is shared with a hyper-thread is slower for both.
    """
    if seconds < bound:
        return True
    measured = []
    for _ in range(3):
        started = time.process_time()
        _work()
        measured.append(time.process_time() - started)
    return seconds < bound * sorted(measured)[1] / _REFERENCE_SECONDS
