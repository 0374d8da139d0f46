"""What is refused of verl's own keys, each with its reason; and that a configuration of ours is not."""

from typing import Any

import pytest

from coca_mindspeed.verl.checks import verl_problems, requirements
from coca_mindspeed.verl.settings import VerlSettings, verl_settings
from tests.verl.configurations import configuration

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def problems(changes: dict[str, Any]) -> list[str]:
    config = configuration(changes)
    return refusals(config, verl_settings(config))


def test_nothing_is_refused_of_a_configuration_of_ours():
    assert problems({}) == []


def test_verls_own_defaults_are_refused_key_by_key():
    """An empty configuration is verl's defaults: GAE, greedy validation, a second clip, another reward manager."""
    found = refusals({"coca": {}}, VerlSettings())
    keys = {line.split(":")[0] for line in found}
    assert {
        "trainer.v1.trainer_mode",
        "algorithm.adv_estimator",
        "reward.reward_manager.name",
        f"{ROLLOUT}.val_kwargs.do_sample",
        f"{ROLLOUT}.val_kwargs.temperature",
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.clip_ratio_c",
        f"{ROLLOUT}.n",
    } == keys


@pytest.mark.parametrize("value", [None, False])
def test_a_critic_may_be_left_to_verl_or_ruled_out(value: bool | None):
    """By null verl asks the estimator whether there is one, and ours needs none."""
    assert problems({"critic.enable": value}) == []


@pytest.mark.parametrize("value", [True, 0, "false"])
def test_a_critic_is_ruled_out_by_false_alone(value: object):
    (line,) = problems({"critic.enable": value})
    assert line.startswith(f"critic.enable: expected null or false, found {value!r}: ")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("trainer.use_v1", False, "V1 trainer"),
        ("trainer.v1.trainer_mode", "separate_async", "'coca'"),
        ("algorithm.adv_estimator", "grpo", "same advantage"),
        ("reward.reward_manager.name", "dapo", "parses no confidence"),
        ("reward.custom_reward_function.path", "mine.py", "special tokens"),
        ("reward.reward_model.enable", True, "grader alone"),
        ("algorithm.filter_groups.enable", True, "still teach a confidence"),
        ("trainer.v1.sampler.custom_sampler.path", "mine.py", "all responses to a question"),
        ("trainer.v1.sampler.sync_refill_failed_groups", True, "broken_groups"),
        ("trainer.v1.sync.parameter_sync_step", 2, "all responses to a question"),
        ("data.gen_batch_size", 1, "all responses to a question"),
        ("data.filter_overlong_prompts", True, "in silence"),
        ("data.truncation", "left", "never cut"),
        ("data.custom_cls.path", "mine.py", "looked at before training"),
        (f"{ROLLOUT}.top_k", 50, "own distribution"),
        (f"{ROLLOUT}.top_p", 0.9, "own distribution"),
        (f"{ROLLOUT}.do_sample", False, "own distribution"),
        (f"{ROLLOUT}.val_kwargs.do_sample", False, "greedy"),
        (f"{ROLLOUT}.val_kwargs.temperature", 0, "greedy"),
        (f"{ROLLOUT}.val_kwargs.n", 4, "one sample"),
        (f"{ROLLOUT}.multi_turn.enable", True, "one turn"),
        ("algorithm.use_kl_in_reward", True, "no KL term"),
        (f"{ACTOR}.use_kl_loss", True, "no KL term"),
        (f"{ACTOR}.entropy_coeff", 0.01, "no entropy term"),
        (f"{ACTOR}.loss_agg_mode", "token-mean", "loss_aggregation=sum"),
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean", "loss_aggregation=sum"),
        (f"{ACTOR}.policy_loss.loss_mode", "gspo", "clipped ratio"),
        (f"{ACTOR}.clip_ratio_c", 3.0, "another objective"),
        (f"{ACTOR}.clip_ratio_c", 1e8, "another objective"),
        (f"{ACTOR}.clip_ratio_high", 0.28, "clip is 0.2"),
        (f"{ACTOR}.strategy", "megatron", "never tried"),
        ("critic.enable", True, "not from a critic"),
        ("trainer.critic_warmup", 5, "would not be trained"),
        ("algorithm.rollout_correction.rollout_is", "token", "another objective"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1", "out of the objective"),
        ("algorithm.rollout_correction.bypass_mode", True, "training engine's own"),
        (f"{ROLLOUT}.n", 1, "a group"),
        (f"{ACTOR}.ppo_mini_batch_size", 6, "a divisor of data.train_batch_size 16"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 5, "a divisor of a rank's 16 rows"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", None, "a divisor of a rank's 16 rows"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 64, "a divisor of a rank's 32 rows"),
        (f"{ROLLOUT}.tensor_model_parallel_size", 4, "does not divide the 2 devices"),
        ("trainer.n_gpus_per_node", 3, "do not divide among 3 data-parallel ranks"),
    ],
)
def test_what_is_not_the_method_is_refused_in_words(key, value, reason):
    found = problems({key: value})
    if key == "trainer.n_gpus_per_node":
        key = f"{ACTOR}.ppo_mini_batch_size"
    (line,) = [line for line in found if line.startswith(f"{key}:")]
    assert reason in line


@pytest.mark.parametrize(
    ("aggregation", "mode"),
    [("sum", "seq-mean-token-sum"), ("token_mean", "token-mean"), ("segment_mean", "seq-mean-token-sum")],
)
def test_each_aggregation_has_its_mode_of_verls(aggregation, mode):
    changes = {"coca.method.loss_aggregation": aggregation, f"{ACTOR}.loss_agg_mode": mode}
    assert problems(changes) == []


def test_microbatches_by_tokens_need_room_for_the_longest_sequence():
    dynamic = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    assert problems(dynamic) == []
    assert "= 128" in problems({**dynamic, f"{ACTOR}.ppo_max_token_len_per_gpu": 100})[0]
    halves = {f"{ACTOR}.ppo_max_token_len_per_gpu": 100, f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    assert problems({**dynamic, **halves}) == []


def test_the_stages_of_sequential_need_a_length_that_they_can_share():
    sequential = {"coca.method.name": "sequential"}
    assert problems({**sequential, "trainer.total_training_steps": 4}) == []
    assert problems({**sequential, "trainer.total_training_steps": 5})[0].startswith("trainer.total_training_steps:")
    assert problems({**sequential, "trainer.total_epochs": 3})[0].startswith("trainer.total_epochs:")


def test_a_truth_value_is_no_number():
    """YAML's ``true`` is 1 to Python, and neither a temperature nor a count."""
    assert problems({f"{ROLLOUT}.val_kwargs.temperature": True})
    assert problems({f"{ACTOR}.use_kl_loss": 0})


def test_every_requirement_says_why():
    for requirement in requirements(VerlSettings()):
        assert requirement.because, requirement.key
        assert requirement.expected, requirement.key


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
def test_a_count_that_is_none_is_refused_beside_everything_else(key: str, value: Any):
    found = problems({key: value, f"{ROLLOUT}.val_kwargs.do_sample": False})
    assert [line for line in found if line.startswith(f"{key}: expected a whole number of 1 or more, found {value!r}")]
    assert [line for line in found if line.startswith(f"{ROLLOUT}.val_kwargs.do_sample")]


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_number_of_steps_is_a_count_or_absent(value: Any):
    key = "trainer.total_training_steps"
    assert problems({key: None}) == []
    assert problems({key: value}) == [f"{key}: expected a whole number of 1 or more, found {value!r}"]


def test_a_count_that_nothing_reads_may_be_absent():
    key, dynamic = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
    divided = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    assert problems({key: None, dynamic: False, **divided}) == []
    assert problems({key: None, dynamic: True}) == [f"{key}: expected a whole number of 1 or more, found None"]
