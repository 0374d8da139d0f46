"""What stands in for MindSpeed-RL's own costs no more: the reward-plus-advantage stage, and the packing of rows."""

import pytest

from tests.integration.mindspeed.environment import needs_mindspeed, printed_by

pytestmark = [*needs_mindspeed, pytest.mark.slow]


def test_not_slower_than_upstream() -> None:
    printed = printed_by("tests.integration.mindspeed.stage_speed")
    for name in ("TIMES", "PACKING"):
        times = printed[name]
        print(name, times)
        # The best of many: other processes of the machine slow both down, but not evenly.
        assert times["ours"]["best"] <= times["upstream"]["best"]
