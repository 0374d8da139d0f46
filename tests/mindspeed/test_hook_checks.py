"""Conditions of the hooks on a MindSpeed-RL configuration, by code and key."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.settings import coca_settings
from coca_mindspeed.mindspeed.upstream_keys import ignored_keys

HOST = {"platform": "host"}
WORKERS: dict[str, Any] = {"ref_config": {"model": "m"}, "reward_config": {"model": "m"}}
SEPARATE = {"use_integrated_worker": False}
ORDERED = {"guarantee_order": True}


def mindspeed_config(**changes):
    config: dict[str, Any] = {
        "megatron_training": {"stage": "ray_grpo", "unknown_to_us": 7},
        "actor_config": {"save": "/somewhere"},
        "rl_config": {"verifier_function": ["coca"], "n_samples_per_prompt": 4, "init_kl_coef": 0.0},
        "generate_config": {},
        "coca": {},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return OmegaConf.create(config)


def problems(**changes):
    try:
        driver.split_config(mindspeed_config(**changes))
    except ConfigError as error:
        return [(problem.code, problem.key) for problem in error.problems]
    return []


def test_mindspeed_keys_pass_through_untouched():
    settings, rest = driver.split_config(mindspeed_config(coca={"method": {"name": "joint"}}))
    assert settings.method.name == "joint"
    assert "coca" not in rest
    assert rest.megatron_training.unknown_to_us == 7


@pytest.mark.parametrize(
    ("section", "values", "code", "key"),
    [
        ("megatron_training", {"stage": "ray_dapo"}, "hook-stage", "megatron_training.stage"),
        ("actor_config", {"stage": "ray_dapo"}, "hook-stage", "actor_config.stage"),
        ("actor_config", {"save": None}, "hook-save", "actor_config.save"),
        *(
            ("rl_config", {"verifier_function": names}, "verifiers", "rl_config.verifier_function")
            for names in (["coca_math"], [], ["coca", "acc"], ["coca", "coca"])
        ),
        ("rl_config", {"n_samples_per_prompt": 1}, "group-size", "rl_config.n_samples_per_prompt"),
        ("rl_config", {"n_samples_per_prompt": "x"}, "wrong-type", "rl_config.n_samples_per_prompt"),
        ("rl_config", {"adv_dispatch_size": 10}, "dispatch-groups", "rl_config.adv_dispatch_size"),
        ("rl_config", {"reward_dispatch_size": 10}, "dispatch-groups", "rl_config.reward_dispatch_size"),
        ("rl_config", {"async_engine": True}, "hook-async-engine", "coca.rollout_log_probs"),
        ("rl_config", {"entropy_coeff": 0.01}, "hook-entropy-coeff", "rl_config.entropy_coeff"),
        ("rl_config", {"partial_rollout_max_split": 2}, "whole-groups", "rl_config.partial_rollout_max_split"),
        ("rl_config", {"data_strategy": "TQ"}, "hook-data-strategy", "rl_config.data_strategy"),
        ("rl_config", {"shuffle_mini_batch": True}, "hook-shuffle-mini-batch", "rl_config.shuffle_mini_batch"),
        ("rl_config", {"filter_groups_enable": True}, "hook-filter-groups-enable", "rl_config.filter_groups_enable"),
        ("rl_config", {"multi_turn_enable": True}, "hook-multi-turn-enable", "rl_config.multi_turn_enable"),
        ("rl_config", {"rule_reward": False}, "hook-rule-reward", "rl_config.rule_reward"),
        (
            *("rl_config", {**ORDERED, "actor_resource": {"num_npus": 1}}),
            *("hook-guarantee-order", "rl_config.guarantee_order"),
        ),
        ("rl_config", SEPARATE, "separate-worker", "ref_config"),
        ("ref_config", {"model": "m"}, "integrated-worker", "ref_config"),
        ("megatron_training", {"data_path": "a.jsonl"}, "data-columns", "megatron_training.dataset_additional_keys"),
        (
            *("actor_config", {"data_path": "a.jsonl", "dataset_additional_keys": ["labels"]}),
            *("data-columns", "actor_config.dataset_additional_keys"),
        ),
        (
            *("megatron_training", {"data_path": "prefix", "dataset_additional_keys": ["coca_record"]}),
            *("record-file", "megatron_training.data_path"),
        ),
        ("coca", {"method": {"name": "cocoa"}}, "value_error", "coca.method.name"),
        ("coca", {"method": {"advantage_eps": "0.05"}}, "float_type", "coca.method.advantage_eps"),
        ("coca", {"method": "joint"}, "model_type", "coca.method"),
        ("coca", {"method": {"entropy_bonus": 0.1}}, "entropy-bonus", "coca.method.entropy_bonus"),
        ("coca", {"method": {"clip": 0.1}}, "hook-clip", "rl_config.clip_ratio"),
        ("coca", {"method": {"loss_aggregation": "mean"}}, "literal_error", "coca.method.loss_aggregation"),
        ("coca", {"grader": "maths"}, "value_error", "coca.grader"),
        ("coca", {"stage": 1}, "value_error", "coca.stage"),
        ("coca", {"groups": 3}, "extra_forbidden", "coca.groups"),
        ("coca", {"eval_interval": 5}, "value_error", "coca.eval_data"),
        ("coca", {"samples_interval": 5}, "value_error", "coca.output_dir"),
        ("coca", {"rollout": "transformers"}, "value_error", "coca.rollout"),
    ],
)
def test_refused_keys(section, values, code, key):
    assert (code, key) in problems(**{section: values})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"actor_config": {"stage": "ray_grpo"}, "megatron_training": {"stage": "ray_dapo"}}, []),
        ({"rl_config": {"data_strategy": "dock", "partial_rollout_max_split": 1}}, []),
        ({"rl_config": {**ORDERED, "actor_resource": {"num_npus": 2}}}, []),
        (
            {
                "megatron_training": {"data_path": "a.jsonl", "dataset_additional_keys": ["coca_record"]},
                "coca": {"eval_interval": 50, "eval_data": "e.jsonl", "output_dir": "o"},
            },
            [],
        ),
        ({"rl_config": SEPARATE, **WORKERS}, [("separate-worker", "rl_config.reference_resource")]),
        ({"rl_config": {**SEPARATE, "reference_resource": {"num_npus": 1}}, **WORKERS}, []),
        (
            {"coca": {**HOST, "host": {"initial_weights": "/hf"}}, "rl_config": {"init_kl_coef": 0.1}},
            [("cpu-reference", "coca.host.initial_weights")],
        ),
        (
            {
                "coca": {**HOST, "host": {"initial_weights": "/hf"}},
                "rl_config": {"init_kl_coef": 0.1},
                "actor_config": {"load": "/megatron"},
            },
            [],
        ),
        (
            {"generate_config": {"infer_tensor_parallel_size": 2}, "coca": HOST},
            [("cpu-one-rank", "generate_config.infer_tensor_parallel_size")],
        ),
        ({"generate_config": {"infer_tensor_parallel_size": 2}, "coca": {**HOST, "rollout": "vllm"}}, []),
        ({"generate_config": {"infer_tensor_parallel_size": 2}}, []),
        (
            {"generate_config": {"offload_train_grad": True}, "coca": HOST},
            [("cpu-offload", "generate_config.offload_train_grad")],
        ),
    ],
)
def test_combinations_of_sections(changes, expected):
    assert problems(**changes) == expected


@pytest.mark.parametrize(("temperature", "measured"), [(1.0, True), (0.7, False)])
def test_log_probabilities_of_another_distribution_are_not_compared(temperature, measured):
    sampling = {"sampling_config": {"temperature": temperature}}
    for coca, expected in (({}, measured), (HOST, True), ({**HOST, "rollout": "vllm"}, measured)):
        settings, _ = driver.split_config(mindspeed_config(generate_config=sampling, coca=coca))
        assert settings.rollout_log_probs == expected


def test_rollout_engines():
    assert coca_settings({}).rollout_engine == "vllm"
    assert coca_settings(HOST).rollout_engine == "transformers"
    assert coca_settings({**HOST, "rollout": "vllm"}).rollout_engine == "vllm"
    assert coca_settings({"method": {"name": "sequential"}, "stage": 1}).stage == 1


def test_ignored_keys():
    rl = {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_penalty": "kl", "verifier_timeout": 30}
    rl |= {"clip_ratio": 0.3}
    own = mindspeed_config(rl_config=rl)
    keys = ["adv_estimator", "use_kl_in_reward", "kl_penalty", "verifier_timeout"]
    found = [(problem.code, problem.key) for problem in ignored_keys(own, reference=False)]
    assert found == [("ignored-key", f"rl_config.{key}") for key in keys]
    theirs = mindspeed_config(rl_config={**rl, "verifier_function": ["acc"]})
    assert len(list(ignored_keys(theirs, reference=True))) == 2
    for name in (name for name in ready_made_runs() if "_910b" in name):
        assert list(ignored_keys(compose_run(name).run.mindspeed_rl, reference=False)) == []
