"""CPUs of a cluster, against what MindSpeed-RL's placement groups ask for."""

import pytest

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.start.cluster import WantedCpus, check_cpus, wanted_cpus


@pytest.mark.parametrize(
    ("rl_config", "nodes", "wanted"),
    [
        ({}, 1, WantedCpus(8, 13)),
        ({}, 2, WantedCpus(8, 14)),
        ({"num_cpus_for_placement_group": 4, "num_cpus_for_local_task": 2}, 1, WantedCpus(4, 15)),
    ],
)
def test_what_is_asked_for(rl_config, nodes, wanted):
    assert wanted_cpus(rl_config, nodes) == wanted


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([(77, 8)], None),
        ([(76, 8)], 7),
        ([(64, 8)], 6),
        ([(192, 16), (192, 16)], None),
        ([(63, 8), (200, 8)], 7),  # a placement group stays on one node
        ([(72, 8), (72, 8)], 7),  # no node has ten left for the dock
        ([(74, 8), (74, 8)], 7),  # and ten are too few where the driver's task and a reward come first
        ([(64, 8), (77, 8)], None),
        ([(8, 8)], 0),
    ],
)
def test_too_few_are_refused_with_what_would_fit(nodes, fits):
    cluster = [{"CPU": float(cpus), "NPU": float(npus)} for cpus, npus in nodes]
    if fits is None:
        check_cpus(cluster, WantedCpus(8, 13))
        return
    remedy = f"num_cpus_for_placement_group to {fits} or less" if fits else "no smaller number is enough"
    with pytest.raises(TrainingError, match=remedy):
        check_cpus(cluster, WantedCpus(8, 13))
