"""Refused values of verl's own keys, by code, key and value."""

import pytest

from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.settings import VerlSettings, verl_settings
from tests.verl.configurations import configuration

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
SAMPLER, VALIDATION = "trainer.v1.sampler", f"{ROLLOUT}.val_kwargs"
TOKENS, DYNAMIC = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
STEPS = "trainer.total_training_steps"


def problems(changes):
    config = configuration(changes)
    return [(p.code, p.key, p.value) for p in verl_problems(config, verl_settings(config))]


def test_verls_own_defaults_are_refused_key_by_key():
    """An empty configuration is verl's defaults: GAE, greedy validation, a second clip, another reward manager."""
    assert {problem.key for problem in verl_problems({"coca": {}}, VerlSettings())} == {
        "trainer.v1.trainer_mode",
        "algorithm.adv_estimator",
        "reward.reward_manager.name",
        f"{VALIDATION}.do_sample",
        f"{VALIDATION}.temperature",
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.clip_ratio_c",
        f"{ROLLOUT}.n",
    }


@pytest.mark.parametrize(
    ("code", "key", "value"),
    [
        ("plugin", "trainer.use_v1", False),
        ("plugin", "trainer.v1.trainer_mode", "separate_async"),
        ("plugin", "algorithm.adv_estimator", "grpo"),
        ("plugin", "reward.reward_manager.name", "dapo"),
        ("plugin", "reward.custom_reward_function.path", "mine.py"),
        ("plugin", "reward.reward_model.enable", True),
        ("groups", "algorithm.filter_groups.enable", True),
        ("groups", f"{SAMPLER}.custom_sampler.path", "mine.py"),
        ("groups", f"{SAMPLER}.sync_refill_failed_groups", True),
        ("groups", "trainer.v1.sync.parameter_sync_step", 2),
        ("groups", "data.gen_batch_size", 1),
        ("data", "data.filter_overlong_prompts", True),
        ("data", "data.truncation", "left"),
        ("data", "data.custom_cls.path", "mine.py"),
        ("sampling", f"{ROLLOUT}.top_k", 50),
        ("sampling", f"{ROLLOUT}.top_p", 0.9),
        ("sampling", f"{ROLLOUT}.do_sample", False),
        ("sampling", f"{ROLLOUT}.multi_turn.enable", True),
        ("evaluation", f"{VALIDATION}.do_sample", False),
        ("evaluation", f"{VALIDATION}.temperature", 0),
        ("evaluation", f"{VALIDATION}.temperature", True),  # a truth value is 1 to Python, and not a number here
        ("evaluation", f"{VALIDATION}.n", 4),
        ("objective", "algorithm.use_kl_in_reward", True),
        ("objective", f"{ACTOR}.use_kl_loss", True),
        ("objective", f"{ACTOR}.use_kl_loss", 0),
        ("objective", f"{ACTOR}.entropy_coeff", 0.01),
        ("objective", f"{ACTOR}.loss_agg_mode", "token-mean"),
        ("objective", f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        ("objective", f"{ACTOR}.policy_loss.loss_mode", "gspo"),
        ("objective", f"{ACTOR}.clip_ratio_c", 3.0),
        ("objective", f"{ACTOR}.clip_ratio_c", 1e8),
        ("objective", f"{ACTOR}.clip_ratio_high", 0.28),
        ("objective", f"{ACTOR}.strategy", "torchtitan"),
        ("objective", f"{ACTOR}.megatron.context_parallel_size", 2),
        ("objective", f"{ACTOR}.megatron.dynamic_context_parallel", True),
        ("entropy-bonus", "coca.method.entropy_bonus", 0.1),
        ("objective", "critic.enable", True),
        ("objective", "critic.enable", 0),
        ("objective", "critic.enable", "false"),
        ("objective", "trainer.critic_warmup", 5),
        ("objective", f"{CORRECTION}.rollout_is", "token"),
        ("objective", f"{CORRECTION}.rollout_rs", "token_k1"),
        ("objective", f"{CORRECTION}.bypass_mode", True),
        ("group-size", f"{ROLLOUT}.n", 1),
        ("mini-batch", f"{ACTOR}.ppo_mini_batch_size", 6),
        ("micro-batch", f"{ACTOR}.ppo_micro_batch_size_per_gpu", 5),
        ("micro-batch", f"{ACTOR}.ppo_micro_batch_size_per_gpu", None),
        ("micro-batch", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 64),
        ("devices", f"{ROLLOUT}.tensor_model_parallel_size", 4),
        ("devices", f"{ACTOR}.ulysses_sequence_parallel_size", 3),
        *(("count", STEPS, value) for value in (0, -1, 1.5, "8", True)),
    ],
)
def test_refused_values(code, key, value):
    assert problems({key: value}) == [(code, key, value)]


def test_mini_batches_divide_among_the_ranks():
    found = [(code, key) for code, key, _ in problems({"trainer.n_gpus_per_node": 3})]
    assert ("mini-batch", f"{ACTOR}.ppo_mini_batch_size") in found


@pytest.mark.parametrize(
    "key",
    [
        "data.train_batch_size",
        "data.max_prompt_length",
        f"{ROLLOUT}.n",
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
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
        *(
            ({"coca.method.loss_aggregation": aggregation, f"{ACTOR}.loss_agg_mode": mode}, [])
            for aggregation, mode in (
                ("sum", "seq-mean-token-sum"),
                ("token_mean", "token-mean"),
                ("segment_mean", "seq-mean-token-sum"),
            )
        ),
        (DYNAMIC_BATCHES, []),
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
