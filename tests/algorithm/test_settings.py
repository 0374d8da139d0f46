import dataclasses
from dataclasses import dataclass

import pytest
import torch
from pydantic import ValidationError

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import METHODS, CocaMethodSettings, MethodSettings, method_settings
from coca_mindspeed.algorithm.methods.settings import OwnMethodSettings, setting, settings_types
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import validation_problems

OUTSIDE = {"ge": lambda bound: bound - 1, "gt": lambda bound: bound, "le": lambda bound: bound + 1, "lt": lambda b: b}
BOUNDS = [
    pytest.param(declared.name, OUTSIDE[bound](value), id=f"{declared.name} {bound} {value}")
    for kind in settings_types()
    for declared in dataclasses.fields(kind)
    for bound, value in declared.metadata.items()
    if bound in OUTSIDE
]


@pytest.mark.parametrize(("key", "value"), dict.fromkeys(one.values for one in BOUNDS))
def test_a_value_out_of_its_bounds_is_refused_by_the_library_and_in_a_configuration(key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        method_settings(**{key: value})
    with pytest.raises(ValidationError) as error:
        RunConfig.model_validate({"method": {key: value}})
    assert [problem.key for problem in validation_problems(error.value)] == [f"method.{key}"]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"advantage_scale": "Batch"}, "advantage_scale"),
        ({"loss_aggregation": "mean"}, "loss_aggregation"),
        ({"advantage_ddof": 2}, "advantage_ddof"),
        ({"name": "cocoa"}, "name"),
        ({"name": "joint", "entropy_bonus": 0.1}, "entropy_bonus"),
    ],
)
def test_other_values_are_refused_with_their_key(keys, error):
    with pytest.raises(ValueError, match=f"^{error}: "):
        method_settings(**keys)
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate({"method": keys})
    assert [problem.key for problem in validation_problems(raised.value)] == [f"method.{error}"]


def test_the_settings_of_a_method_have_its_type():
    assert {name: type(method_settings(name)) for name in METHODS} == {
        name: CocaMethodSettings if name == "coca" else MethodSettings for name in METHODS
    }
    assert method_settings("joint", entropy_bonus=0.0) == MethodSettings(name="joint")
    with pytest.raises(ValueError, match=r"^name: "):
        MethodSettings(name="coca")
    with pytest.raises(TypeError):
        method_settings("coca", epsilon=0.1)


def test_a_configuration_holds_them_and_writes_them_as_they_are():
    given = method_settings("rlcr", advantage_eps=0.05)
    run = RunConfig(method=given)
    assert run.method is given
    assert RunConfig.model_validate(run.model_dump(mode="json")) == run
    assert "entropy_bonus" not in run.model_dump()["method"]
    assert RunConfig().model_dump()["method"] == dataclasses.asdict(CocaMethodSettings())


@pytest.mark.parametrize(("stage", "index"), [(None, None), (2, None), (-1, None), (1, 1)])
def test_the_stage_of_a_method_with_two(stage, index):
    settings = method_settings("sequential")
    if index is None:
        with pytest.raises(ValueError, match=r"^stage: .*0 \(accuracy\), 1 \(confidence\)"):
            CreditRule(settings, stage)
    else:
        assert CreditRule(settings, stage).stage == index


def test_a_key_of_one_method_is_a_field_of_its_subtype():
    """A bonus of 1 for each valid confidence, by a method of one's own."""

    @dataclass(frozen=True, kw_only=True)
    class Bold(OwnMethodSettings):
        courage: float = setting(1.0, "bonus for a valid confidence", ge=0)
        reads_log_probs = True

        def confidence_bonus(self, log_probs):
            return torch.full_like(log_probs, self.courage)

    with pytest.raises(ValueError, match=r"^courage: "):
        Bold(method=METHODS["coca"], courage=-1.0)
    correct, stated = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.0, float("nan")]])
    bold = Bold(method=METHODS["coca"], courage=3.0, separate_format=False, advantage_scale="none")
    credit = CreditRule(bold)(correct, stated, torch.zeros(1, 3))
    rewards = torch.tensor([3 - (0.5 - 2 / 3) ** 2, 3 - (2 / 3) ** 2, -1.0])
    torch.testing.assert_close(credit.segments["confidence"].values[0], rewards - rewards.mean())
