"""The serving file: what it says, and errors that name file and key."""

import re
from pathlib import Path

import pytest

from coca_mindspeed.errors import ConfigError
from coca_router.config import read_serving_config, tier_policies

GOOD = """
backends:
  a: {url: "http://127.0.0.1:1/v1", model: small}
  b: {url: "http://127.0.0.1:2/v1", model: large, dialect: vllm}
tiers:
  - name: small
    backend: a
    bands: [{at_least: 0.7, action: answer}, {at_least: 0, action: escalate}]
  - {name: large, backend: b, states_confidence: false, temperature: 1}
"""


def written(tmp_path, text):
    path = tmp_path / "serving.yaml"
    path.write_text(text)
    return path


def test_a_small_file_and_its_defaults(tmp_path):
    config = read_serving_config(written(tmp_path, GOOD))
    assert (config.listen.host, config.limits.concurrent) == ("127.0.0.1", 256)
    policies = tier_policies(config)
    assert [band.action for band in policies[0].rule.bands] == ["answer", "escalate"]
    assert policies[1].rule is None
    alone = GOOD.replace("escalate", "refuse").partition("  - {name: large")[0]
    config = read_serving_config(written(tmp_path, alone))
    assert [policies[0].rule.invalid, tier_policies(config)[0].rule.invalid] == ["escalate", "refuse"]
    assert config.log is None


# A change of the file, and the key and code of the problem.
MISTAKES = [
    (("\nbackends:", "\nbackend:"), "backend", "extra_forbidden"),
    (("bands:", "band:"), "tiers.0.band", "extra_forbidden"),
    (("model: small", "model: small, dialekt: vllm"), "backends.a.dialekt", "extra_forbidden"),
    (("at_least: 0.7", "at_least: 1.7"), "tiers.0.bands.0.at_least", "less_than_equal"),
    (("at_least: 0,", "at_least: 0.1,"), "tiers.0", "value_error"),
    (("action: answer", "action: reply"), "tiers.0.bands.0.action", "literal_error"),
    (("backend: a", "backend: c"), "tiers.0.backend", "value_error"),
    (("name: large", "name: small"), "tiers", "value_error"),
    (("    bands: [{at_least: 0.7, action: answer}, {at_least: 0, action: escalate}]\n", ""), "tiers.0", "value_error"),
    (("backend: a", "backend: a\n    certificate: m.json"), "tiers.0", "value_error"),
    (("backend: a", "backend: a\n    calibration: m\n    certificate: m"), "tiers.0.certificate", "value_error"),
    (("http://127.0.0.1:1/v1", "127.0.0.1:1"), "backends.a.url", "string_pattern_mismatch"),
    (
        (", states_confidence: false", ", bands: [{at_least: 0, action: escalate}]"),
        "tiers.1.bands.0.action",
        "value_error",
    ),
    ((", states_confidence: false", ", certificate: m, invalid: escalate"), "tiers.1.invalid", "value_error"),
    (("temperature: 1", "temperature: '1'"), "tiers.1.temperature", "float_type"),
    (("tiers:", "listen: {origins: ['http://page.lan/']}\ntiers:"), "listen.origins.0", "string_pattern_mismatch"),
    (("tiers:", "listen: {origins: ['*']}\ntiers:"), "listen.origins.0", "string_pattern_mismatch"),
    ((", states_confidence: false", ", confidence: {source: answer_logprob}"), "tiers.1", "value_error"),
    (
        (", states_confidence: false", ", states_confidence: false, bands: [{at_least: 0, action: answer}]"),
        "tiers.1.states_confidence",
        "value_error",
    ),
    (("model: small", "model: small, token_limit: max_new"), "backends.a.token_limit", "literal_error"),
]


@pytest.mark.parametrize(("change", "key", "code"), MISTAKES)
def test_mistakes_are_named_with_file_and_key(tmp_path, change, key, code):
    path = written(tmp_path, GOOD.replace(*change, 1))
    with pytest.raises(ConfigError) as error:
        read_serving_config(path)
    assert (key, code) in {(problem.key, problem.code) for problem in error.value.problems}
    assert all(line.startswith(f"{path}: ") for line in str(error.value).splitlines())


def test_all_mistakes_are_named_and_invalid_yaml_is_refused(tmp_path):
    path = written(tmp_path, GOOD.replace("bands:", "band:").replace("temperature: 1", "temparature: 1"))
    with pytest.raises(ConfigError) as error:
        read_serving_config(path)
    assert len(str(error.value).splitlines()) == 2
    for text in ("- 1", "a: [", ""):
        with pytest.raises(ConfigError, match=r"serving\.yaml"):
            read_serving_config(written(tmp_path, text))


def test_the_examples_of_the_page_are_configurations(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    examples = re.findall(r"<<'YAML'\n(.*?)\nYAML\n", page, re.DOTALL)
    configs = [read_serving_config(written(tmp_path, example)) for example in examples]
    tiers = [[(tier.name, tier.states_confidence) for tier in config.tiers] for config in configs]
    assert tiers == [[("small", True), ("large", False)], [("small", True)], [("small", True), ("large", True)]]


def test_paths_are_relative_to_the_file(tmp_path):
    text = GOOD.replace("backend: a", "backend: a\n    calibration: m.json") + "log: {directory: l}\n"
    config = read_serving_config(written(tmp_path, text))
    assert config.tiers[0].calibration == str(tmp_path / "m.json")
    assert config.log.directory == str(tmp_path / "l")
