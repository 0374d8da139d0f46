"""How things are timed: alternating, so that a machine that gets busier is busier for all of them."""

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate over ``rounds`` rounds in turn, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for work in candidates.values():
        work()
    for _ in range(rounds):
        for name, work in candidates.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
