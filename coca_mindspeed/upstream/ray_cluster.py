"""Waiting for a complete Ray cluster; the caller passes the ``ray`` module."""

import time
from collections.abc import Callable
from typing import Any

from coca_mindspeed.errors import TrainingError

_POLL = 2.0
_REPORT = 30.0  # seconds between two lines on a wait


def wait_for_cluster(
    ray: Any,
    wanted: int,
    what: str,
    count: Callable[[], int],
    timeout: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Join the cluster of ``RAY_ADDRESS`` and return once ``count()`` reaches ``wanted`` things (``what``).

    Prints what it waits for, and twice a minute how much is there. Raises TrainingError for fewer than ``wanted``
    after ``timeout`` seconds.
    """
    print(f"waiting for {wanted} {what} in the Ray cluster, for up to {timeout:g} seconds", flush=True)
    begin = clock()
    report = begin + _REPORT
    while (found := count() if _has_joined(ray) else 0) < wanted:
        waited = clock() - begin
        if clock() >= report:
            print(f"{found} of {wanted} {what} after {waited:.0f} seconds", flush=True)
            report += _REPORT
        if waited >= timeout:
            raise TrainingError(
                f"the Ray cluster has {found} of {wanted} {what} after {timeout:g} seconds; look at the other nodes' "
                "output: each runs the same command, with its own NODE_RANK and the head's MASTER_ADDR"
            )
        sleep(_POLL)


def _has_joined(ray: Any) -> bool:
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:  # not up yet
            return False
    return True
