"""``ray start`` for slow machines: ``python -m coca_mindspeed.upstream.ray_start SECONDS OPTION ...``.

Ray gives a node half a minute to start. A cold file system or a busy machine needs more.
"""

import functools
import importlib
import sys
import time
from typing import Any

from coca_mindspeed.utils.packages import name_missing_packages


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


def main() -> None:
    wait_for_slow_nodes(float(sys.argv[1]))
    importlib.import_module("ray.scripts.scripts").cli(["start", *sys.argv[2:]])


if __name__ == "__main__":
    name_missing_packages()
    main()
