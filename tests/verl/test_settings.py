"""The section coca of a verl configuration, and the stage of a step."""

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.verl.settings import VerlSettings, verl_settings


def test_a_configuration_without_the_section_is_told_how_to_write_one():
    for config in ({}, {"coca": None}, {"coca": "coca"}):
        with pytest.raises(ConfigError, match=r"^coca: .*coca\.method\.name=coca"):
            verl_settings(config)
    assert verl_settings({"coca": {}}).method.name == "coca"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"metod": {}}, r"coca\.metod: "),
        ({"method": {"name": "cocoa"}}, r"coca\.method\.name=.*did you mean 'coca'"),
        ({"grader": "maths"}, r"coca\.grader=.*did you mean 'math'"),
        ({"broken_groups": -1}, r"coca\.broken_groups=-1"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(section, message):
    with pytest.raises(ConfigError, match=message):
        verl_settings({"coca": section})


def test_dumps_come_at_their_interval():
    settings = VerlSettings(samples_interval=4)
    assert [step for step in range(1, 10) if settings.dumps(step)] == [1, 4, 8]
    assert not any(VerlSettings(samples_interval=0).dumps(step) for step in range(1, 10))


def test_the_stages_of_a_method_share_a_run_equally():
    sequential = VerlSettings.model_validate({"method": {"name": "sequential"}})
    assert [sequential.stage(step, 6) for step in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert [VerlSettings().stage(step, 3) for step in (1, 2, 3)] == [0, 0, 0]
    assert sequential.stage(7, 6) == 1, "a step beyond the last stays in the last stage"
