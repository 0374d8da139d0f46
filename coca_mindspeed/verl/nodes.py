"""Wait until a Ray cluster has all of its nodes: ``python -m coca_mindspeed.verl.nodes N --timeout SECONDS``."""

import argparse
import sys
import time
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """0 once they are there; 1, and how many there were, where they are not in time."""
    parser = argparse.ArgumentParser(description="Wait until a Ray cluster has all of its nodes.")
    parser.add_argument("nodes", type=int, metavar="N")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    import ray

    ray.init(address="auto", log_to_driver=False)
    until = time.monotonic() + arguments.timeout
    while (alive := sum(bool(node["Alive"]) for node in ray.nodes())) < arguments.nodes:
        if time.monotonic() > until:
            print(f"nodes: {alive} of {arguments.nodes} after {arguments.timeout:g} seconds", file=sys.stderr)
            return 1
        time.sleep(2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
