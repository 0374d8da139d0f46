"""Wait until a Ray cluster has all of its NPUs, and check its CPUs.

``python -m coca_mindspeed.mindspeed.start.cluster --npus N --cpus-per-npu N --other-cpus N --timeout SECONDS``
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.utils.packages import name_missing_packages

if __name__ == "__main__":
    name_missing_packages()

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.upstream.ray_cluster import wait_and_report, wait_for_cluster

_DOCK_CPUS = 10  # reserved by GRPOTransferDock on one node


@dataclass(frozen=True, slots=True)
class WantedCpus:
    """CPUs that MindSpeed-RL reserves: per NPU, on its node, and for all other actors together."""

    per_npu: int
    others: int


def wanted_cpus(rl_config: Mapping[str, Any], nodes: int) -> WantedCpus:
    """Read the CPUs from ``rl_config``, with MindSpeed-RL's defaults.

    The others are the transfer dock, the task of ``train``, a rule reward per node, and the advantage stage.
    """
    task = int(rl_config.get("num_cpus_for_local_task", 1))
    return WantedCpus(int(rl_config.get("num_cpus_for_placement_group", 8)), _DOCK_CPUS + 1 + nodes * task + task)


def check_cpus(nodes: Sequence[Mapping[str, float]], wanted: WantedCpus) -> None:
    """Raise ``TrainingError`` for a cluster in which a placement group would wait forever.

    ``nodes`` are the resources ``CPU`` and ``NPU`` of each node; the message names a number that would fit.
    """
    if _fit(nodes, wanted.per_npu, wanted.others):
        return
    has = "; ".join(f"{int(node.get('CPU', 0))} CPUs with {int(node.get('NPU', 0))} NPUs" for node in nodes)
    fewer = next((n for n in range(wanted.per_npu - 1, 0, -1) if _fit(nodes, n, wanted.others)), None)
    remedy = (
        "no smaller number is enough: the nodes need more CPUs"
        if fewer is None
        else f"lower mindspeed_rl.rl_config.num_cpus_for_placement_group to {fewer} or less"
    )
    raise TrainingError(
        f"MindSpeed-RL reserves {wanted.per_npu} CPUs per NPU on its node and {wanted.others} others ({_DOCK_CPUS} of "
        f"them on one node), and waits until they are free; the nodes have {has}; {remedy}"
    )


def _fit(nodes: Sequence[Mapping[str, float]], per_npu: int, others: int) -> bool:
    """Whether all actors find CPUs, wherever the small ones are placed before the dock."""
    spare = [int(node.get("CPU", 0)) - per_npu * int(node.get("NPU", 0)) for node in nodes]
    task = (others - _DOCK_CPUS - 1) // (len(nodes) + 1)
    before_the_dock = 1 + task  # the driver's task and a reward may be placed on the node with most CPUs
    return min(spare, default=0) >= 0 and max(spare, default=0) >= _DOCK_CPUS + before_the_dock and sum(spare) >= others


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m coca_mindspeed.mindspeed.start.cluster", description=__doc__)
    parser.add_argument("--npus", type=int, required=True)
    parser.add_argument("--cpus-per-npu", type=int, required=True)
    parser.add_argument("--other-cpus", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parsed = parser.parse_args(arguments)
    import ray

    def npus() -> int:
        return int(ray.cluster_resources().get("NPU", 0))

    def wait() -> None:
        wait_for_cluster(ray, parsed.npus, "NPUs", npus, parsed.timeout)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_cpus(nodes, WantedCpus(parsed.cpus_per_npu, parsed.other_cpus))

    return wait_and_report(wait, f"{parsed.npus} NPUs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
