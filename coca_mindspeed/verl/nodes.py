"""Wait until a Ray cluster has N nodes: ``python -m coca_mindspeed.verl.nodes N --timeout SECONDS``."""

import argparse
import sys
from collections.abc import Sequence

from coca_mindspeed.utils.packages import name_missing_packages

if __name__ == "__main__":
    name_missing_packages()

from coca_mindspeed.errors import CocaError
from coca_mindspeed.upstream.ray_cluster import wait_for_cluster
from coca_mindspeed.utils.console import print_failure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coca_mindspeed.verl.nodes", description=__doc__)
    parser.add_argument("nodes", type=int, metavar="N")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parsed = parser.parse_args(argv)
    import ray

    def alive() -> int:
        return sum(bool(node["Alive"]) for node in ray.nodes())

    try:
        wait_for_cluster(ray, parsed.nodes, "nodes", alive, parsed.timeout)
    except CocaError as error:
        return print_failure(error, error.exit_code)
    print(f"the Ray cluster has {parsed.nodes} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
