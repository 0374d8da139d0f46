"""Waiting for a complete Ray cluster; the caller passes the ``ray`` module."""

import time
from collections.abc import Callable
from typing import Any

from coca_mindspeed.errors import TrainingError

_POLL = 2.0


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

    Raises TrainingError for fewer than ``wanted`` after ``timeout`` seconds.
    """
    end = clock() + timeout
    while (found := count() if _has_joined(ray) else 0) < wanted:
        if clock() >= end:
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
