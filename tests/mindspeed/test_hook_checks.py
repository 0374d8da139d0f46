"""Conditions of the hooks on a MindSpeed-RL configuration, by code and key."""

import json

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.upstream_keys import ignored_keys
from tests.mindspeed.builders import mindspeed_config
from tests.tables import read_table

HOST = {"platform": "host"}


def problems(**changes):
    try:
        driver.split_config(mindspeed_config(**changes))
    except ConfigError as error:
        return [(problem.code, problem.key) for problem in error.problems]
    return []


@pytest.mark.parametrize(("changes", "expected"), read_table(__file__, "hook_checks.tsv"))
def test_problems_by_code_and_key(changes, expected):
    assert " ".join(f"{code} {key}" for code, key in problems(**json.loads(changes))) == expected


@pytest.mark.parametrize(("temperature", "measured"), [(1.0, True), (0.7, False)])
def test_log_probabilities_of_another_distribution_are_not_compared(temperature, measured):
    sampling = {"sampling_config": {"temperature": temperature}}
    for coca, expected in (({}, measured), (HOST, True), ({**HOST, "rollout": "vllm"}, measured)):
        settings, _ = driver.split_config(mindspeed_config(generate_config=sampling, coca=coca))
        assert settings.rollout_log_probs == expected
        assert settings.rollout_engine == ("transformers" if coca == HOST else "vllm")


def test_ignored_keys():
    rl = {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_penalty": "kl", "verifier_timeout": 30}
    rl |= {"clip_ratio": 0.3}
    own = mindspeed_config(rl_config=rl)
    keys = ["adv_estimator", "use_kl_in_reward", "kl_penalty", "verifier_timeout"]
    found = [(problem.code, problem.key) for problem in ignored_keys(own, reference=False)]
    assert found == [("ignored-key", f"rl_config.{key}") for key in keys]
    theirs = mindspeed_config(rl_config={**rl, "verifier_function": ["acc"]})
    assert len(list(ignored_keys(theirs, reference=True))) == 2
