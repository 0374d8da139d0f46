"""Refused values of verl's own keys, by code, key and value."""

import json

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.settings import VerlSettings, verl_settings
from tests.tables import read_table
from tests.verl.configurations import configuration, verls_defaults

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VALIDATION = f"{ROLLOUT}.val_kwargs"
TOKENS, DYNAMIC = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
STEPS = "trainer.total_training_steps"


def problems(changes):
    config = configuration(changes)
    return [(p.code, p.key, p.value) for p in verl_problems(config, verl_settings(config))]


def test_verls_own_defaults_are_refused_key_by_key():
    """GAE, greedy validation, another reward manager."""
    defaults = OmegaConf.to_container(verls_defaults(), resolve=True)
    assert {problem.key for problem in verl_problems(defaults, VerlSettings())} == {
        "trainer.v1.trainer_mode",
        "algorithm.adv_estimator",
        "reward.reward_manager.name",
        f"{ROLLOUT}.name",
        f"{VALIDATION}.do_sample",
        f"{VALIDATION}.temperature",
        f"{ROLLOUT}.n",
    }


@pytest.mark.parametrize(("code", "key", "value"), read_table(__file__, "refused_values.tsv"))
def test_refused_values(code, key, value):
    assert problems({key: json.loads(value)}) == [(code, key, json.loads(value))]


def test_truncated_importance_sampling_by_tokens_needs_log_probs_of_the_rollout():
    key, log_probs = "algorithm.rollout_correction", f"{ROLLOUT}.calculate_log_probs"
    changes = {f"{key}.rollout_is": "token", f"{key}.rollout_is_threshold": 2.5}
    assert problems(changes) == []
    assert problems({log_probs: False}) == []
    assert problems({**changes, log_probs: False}) == [("objective", log_probs, False)]


@pytest.mark.parametrize(
    "key",
    [
        "data.train_batch_size",
        f"{ROLLOUT}.n",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
    ],
)
@pytest.mark.parametrize("value", [0, -1, None, 1.5, "8", True])
def test_counts_are_refused_beside_everything_else(key, value):
    found = problems({key: value, f"{VALIDATION}.do_sample": False})
    assert found == [("evaluation", f"{VALIDATION}.do_sample", False), ("count", key, value)]


DYNAMIC_BATCHES = {DYNAMIC: True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
SEQUENTIAL = {"coca.method.name": "sequential"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"critic.enable": None}, []),  # verl asks the estimator, and ours needs no critic
        ({"critic.enable": False}, []),
        ({"coca.method.clip": 0.1, "coca.method.loss_aggregation": "segment_mean"}, []),
        ({"trainer.n_gpus_per_node": 3}, [("mini-batch", f"{ACTOR}.ppo_mini_batch_size", 8)]),
        ({f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_c": 3}, []),  # unset, and verl's default
        ({f"{ACTOR}.strategy": "megatron"}, [("engine", f"{ACTOR}.strategy", "megatron")]),  # not null sizes
        ({f"{ACTOR}.fsdp_config": None}, [("engine", f"{ACTOR}.strategy", "fsdp")]),
        (DYNAMIC_BATCHES, []),
        ({f"{ROLLOUT}.max_model_len": 128, f"{ROLLOUT}.prompt_length": 64, f"{ROLLOUT}.dtype": "float32"}, []),
        ({**DYNAMIC_BATCHES, TOKENS: 100}, [("packing", TOKENS, 100)]),  # less than 128
        ({**DYNAMIC_BATCHES, TOKENS: 100, f"{ACTOR}.ulysses_sequence_parallel_size": 2}, []),
        ({TOKENS: None, DYNAMIC: True}, [("count", TOKENS, None)]),
        ({TOKENS: None, DYNAMIC: False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}, []),
        ({STEPS: None}, []),
        ({**SEQUENTIAL, STEPS: 4}, []),
        ({**SEQUENTIAL, STEPS: 5}, [("stages", STEPS, 5)]),
        ({**SEQUENTIAL, "trainer.total_epochs": 3}, [("stages", "trainer.total_epochs", 3)]),
    ],
)
def test_combinations(changes, expected):
    assert problems(changes) == expected


EVALUATIONS = ("trainer.test_freq", "trainer.val_before_train", "trainer.val_only")
_NEVER = (-1, False, False)
_SHARED = [("same-data", "data.val_files", "b.parquet")]


@pytest.mark.parametrize(
    ("evaluations", "train", "evaluate", "expected"),
    [
        (_NEVER, "b.parquet", "b.parquet", []),
        ((5, False, False), "b.parquet", "b.parquet", _SHARED),
        ((-1, True, False), "b.parquet", "b.parquet", _SHARED),
        ((-1, False, True), "b.parquet", "b.parquet", _SHARED),
        ((5, True, True), ["a.parquet", "b.parquet"], ["c.parquet", "b.parquet"], _SHARED),
        ((5, True, True), ["a.parquet", "b.parquet"], ["c.parquet"], []),
    ],
)
def test_no_file_is_for_both_training_and_an_evaluation(evaluations, train, evaluate, expected):
    changes = dict(zip(EVALUATIONS, evaluations, strict=True))
    assert problems({**changes, "data.train_files": train, "data.val_files": evaluate}) == expected


def test_a_required_key_that_the_configuration_lacks_is_refused_and_one_without_effect_is_not():
    config = configuration()
    del config["algorithm"]["filter_groups"], config["algorithm"]["gamma"]
    found = [(p.code, p.key, p.value) for p in verl_problems(config, verl_settings(config))]
    assert found == [("groups", "algorithm.filter_groups.enable", None)]


COLOCATE = {"trainer.v1.trainer_mode": "coca_colocate_async", "algorithm.rollout_correction.rollout_is": "token"}
SEPARATE = {
    **COLOCATE,
    "trainer.v1.trainer_mode": "coca_separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 2,
    f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
}
IS, BACKEND = "algorithm.rollout_correction.rollout_is", f"{ROLLOUT}.checkpoint_engine.backend"
BEST = {
    "trainer.checkpoint_callback_class": "coca_mindspeed.verl.checkpoints.BestCheckpoint",
    "trainer.save_freq": 50,
    "trainer.test_freq": 25,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (COLOCATE, []),
        ({**COLOCATE, IS: None}, [("objective", IS, None)]),
        (
            {**COLOCATE, "trainer.v1.colocate_async.parameter_sync_step": 2},
            [("groups", "trainer.v1.colocate_async.parameter_sync_step", 2)],
        ),
        (SEPARATE, []),
        ({**SEPARATE, f"{ROLLOUT}.n_gpus_per_node": None}, []),  # those of trainer.n_gpus_per_node, as in verl
        ({**SEPARATE, f"{ROLLOUT}.nnodes": 0}, [("devices", f"{ROLLOUT}.nnodes", 0)]),
        ({**SEPARATE, BACKEND: "naive"}, [("devices", BACKEND, "naive")]),
        ({**SEPARATE, "data.train_batch_size": 24}, [("mini-batch", "data.train_batch_size", 24)]),
        (
            {**SEPARATE, f"{ROLLOUT}.n_gpus_per_node": 3, f"{ROLLOUT}.tensor_model_parallel_size": 2},
            [("devices", f"{ROLLOUT}.tensor_model_parallel_size", 2)],
        ),
        # A step computes log-probs of one mini-batch of 8 questions at a time: 16 rows a rank.
        (
            {**SEPARATE, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 32},
            [("micro-batch", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 32)],
        ),
        (BEST, []),
        ({**BEST, "trainer.test_freq": 40}, [("best-checkpoint", "trainer.test_freq", 40)]),
        ({**BEST, "trainer.test_freq": -1}, [("best-checkpoint", "trainer.test_freq", -1)]),
        (
            {**BEST, f"{ACTOR}.checkpoint.async_save": True},
            [("best-checkpoint", f"{ACTOR}.checkpoint.async_save", True)],
        ),
    ],
)
def test_trainers_and_their_checkpoints(changes, expected):
    assert problems(changes) == expected


@pytest.mark.parametrize(
    ("tensor", "pipeline", "micro", "expected"),
    [
        (2, 1, 8, []),
        (1, 2, 32, []),
        (1, 2, 3, [("micro-batch", f"{ACTOR}.ppo_micro_batch_size_per_gpu", 3)]),
        (2, 2, 4, [("devices", f"{ACTOR}.megatron.tensor_model_parallel_size", 2)]),  # four devices a rank, of two
    ],
)
def test_megatron_divides_the_devices_by_tensor_and_pipeline_parallelism(tensor, pipeline, micro, expected):
    changes = {
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size": tensor,
        f"{ACTOR}.megatron.pipeline_model_parallel_size": pipeline,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
    }
    assert problems(changes) == expected


@pytest.mark.parametrize(
    ("optim", "steps", "wrong"),
    [
        ({"lr_warmup_steps": 10}, 10, "lr_warmup_steps"),
        ({"lr_warmup_steps": 9, "lr_warmup_steps_ratio": 1.0}, 10, None),
        ({"lr_warmup_steps": 9, "lr_decay_steps": 5}, 10, "lr_warmup_steps"),
        ({"lr_warmup_steps": 10}, None, None),  # the number of rows is not known here
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 1.0}, None, "lr_warmup_steps_ratio"),
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.5}, 10, None),
    ],
)
def test_megatrons_warm_up_ends_before_the_run(optim, steps, wrong):
    changes = {f"{ACTOR}.optim.{name}": value for name, value in optim.items()} | {STEPS: steps}
    assert problems(changes) == []  # FSDP only never reaches the peak
    key = f"{ACTOR}.optim.{wrong}"
    megatron = {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 1}
    found = problems({**changes, **megatron, f"{ACTOR}.megatron.pipeline_model_parallel_size": 1})
    assert found == ([("warm-up", key, optim[wrong])] if wrong else [])
