"""Start a node of a Ray cluster on a slow machine, and wait for a complete cluster.

``python -m coca_mindspeed.upstream.ray_cluster start SECONDS OPTION ...`` is ``ray start`` with a longer limit: Ray
gives a node half a minute to start, and a cold file system or a busy machine needs more.
"""

import ctypes
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from coca_mindspeed.utils.packages import name_missing_packages

if __name__ == "__main__":
    name_missing_packages()

from coca_mindspeed.errors import TrainingError

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL = 2.0
_REPORT = 30.0  # seconds between two lines on a wait


def set_ray_defaults() -> None:
    """Set Ray's variables that it reads when it is imported, unless they are set.

    Its default of half a minute for a node is too short on a busy machine, and repeated lines of a log may matter.
    """
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def wait_for_cluster(
    wanted: int, resource: str | None, timeout: float, ended: Callable[[], int | None] = lambda: None
) -> None:
    """Return once the cluster of ``RAY_ADDRESS`` has ``wanted`` nodes, or as much of a resource of Ray's (``NPU``).

    Prints what it waits for, and twice a minute how much is there. Raises TrainingError for fewer than ``wanted``
    after ``timeout`` seconds, and at once if ``ended`` gives the exit code of the head.
    """
    ray: Any = importlib.import_module("ray")
    what = "nodes" if resource is None else f"{resource}s"

    def count() -> int:
        if resource is None:
            return sum(bool(node["Alive"]) for node in ray.nodes())
        return int(ray.cluster_resources().get(resource, 0))

    try:
        _wait(ray, wanted, what, count, timeout, ended)
    finally:
        ray.shutdown()  # a training connects with settings of its own
    print(f"the Ray cluster has {wanted} {what}", flush=True)


def _wait(
    ray: Any, wanted: int, what: str, count: Callable[[], int], timeout: float, ended: Callable[[], int | None]
) -> None:
    print(f"waiting for {wanted} {what} in the Ray cluster, for up to {timeout:g} seconds", flush=True)
    begin = time.monotonic()
    report = begin + _REPORT
    while (found := count() if _has_joined(ray) else 0) < wanted:
        if (code := ended()) is not None:
            raise TrainingError(f"the Ray head of this node has ended with code {code}; see its output above")
        waited = time.monotonic() - begin
        if begin + waited >= report:
            print(f"{found} of {wanted} {what} after {waited:.0f} seconds", flush=True)
            report += _REPORT
        if waited >= timeout:
            raise TrainingError(
                f"the Ray cluster has {found} of {wanted} {what} after {timeout:g} seconds; look at the other nodes' "
                "output: each runs the same command, with its own NODE_RANK and the head's MASTER_ADDR"
            )
        time.sleep(_POLL)


def _has_joined(ray: Any) -> bool:
    if not ray.is_initialized():
        try:
            with own_signal_handlers():
                ray.init(address="auto", log_to_driver=False)
        except ConnectionError:  # not up yet
            return False
    return True


def wait_for_slow_nodes(seconds: float) -> None:
    """Let Ray wait ``seconds`` for a node that this process starts.

    Ray's limits are the default of a parameter (2.42) and a loop around ``get_node``, which fails after half a minute
    (newer ones). ``RAY_raylet_start_wait_time_s`` would extend it too, but signals are not handled in such a wait.
    """
    services: Any = importlib.import_module("ray._private.services")
    get_node = services.get_node

    def get_node_for_longer(*arguments: Any) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                left = end - time.monotonic()
                if left <= 0:
                    raise
                print(f"Ray's node has not started yet; waiting for up to {left:.0f} seconds more", flush=True)
                time.sleep(1)

    services.get_node = get_node_for_longer
    services.wait_for_node = functools.partial(services.wait_for_node, timeout=seconds)


def end_at_the_first_signal() -> None:
    """Let Ray's node of this process end at the first SIGTERM, SIGINT or SIGHUP, and ignore the others.

    Ray ends its processes in the signal's handler under a lock, for which the handler of another signal would wait for
    ever.
    """
    utils: Any = importlib.import_module("ray._private.utils")
    set_handler = utils.set_sigterm_handler

    def set_once(handler: Callable[[int, FrameType | None], object]) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            for each in signals:
                signal.signal(each, signal.SIG_IGN)
            handler(number, frame)

        signals = [each for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN]
        set_handler(handle)
        for each in signals:
            signal.signal(each, handle)

    utils.set_sigterm_handler = set_once


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Restore this process's handlers of signals once Ray has connected: Ray's own, in C++ too, end it at once."""
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent dies, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    _, seconds, *options = arguments
    end_with_parent()
    wait_for_slow_nodes(float(seconds))
    end_at_the_first_signal()
    importlib.import_module("ray.scripts.scripts").cli(["start", *options])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
