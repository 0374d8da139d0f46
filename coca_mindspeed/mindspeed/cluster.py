"""Wait until a Ray cluster has all of its NPUs: ``python -m coca_mindspeed.mindspeed.cluster --npus N --timeout S``."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from coca_mindspeed.errors import CocaError, TrainingError

_POLL = 2.0


def wait_for_npus(
    wanted: int,
    timeout: float,
    count: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return as soon as ``count()`` reaches ``wanted``.

    Raises:
        TrainingError: it has not after ``timeout`` seconds; the message says how many are there.
    """
    end = clock() + timeout
    while (found := count()) < wanted:
        if clock() >= end:
            raise TrainingError(
                f"the Ray cluster has {found} of {wanted} NPUs after {timeout:g} seconds; look at the other nodes' "
                "output: each runs the same command, with its own NODE_RANK and the head's MASTER_ADDR"
            )
        sleep(_POLL)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m coca_mindspeed.mindspeed.cluster", description=__doc__)
    parser.add_argument("--npus", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parsed = parser.parse_args(arguments)
    import ray

    def connected_npus() -> int:
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False)  # RAY_ADDRESS says where
            except ConnectionError:
                return 0
        return int(ray.cluster_resources().get("NPU", 0))

    try:
        wait_for_npus(parsed.npus, parsed.timeout, connected_npus)
    except CocaError as error:
        print(f"coca-mindspeed: {error}", file=sys.stderr)
        return 1
    print(f"the Ray cluster has {parsed.npus} NPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
