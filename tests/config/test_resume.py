"""Facts of the keys: which are refused on a cluster, and which a resumed run may change, on each engine."""

import pytest

from coca_mindspeed.config.checks import check_resumed_settings
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import fact_of, facts_of, keys_of_identity, unread_keys
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.integrations.settings import IntegrationSettings
from coca_mindspeed.mindspeed.keys import identity_keys
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.verl.settings import VerlSettings

FACTS = facts_of(RunConfig)
SECTIONS = {name for name in FACTS if any(key.startswith(f"{name}.") for key in FACTS)} - {"model.architecture"}
KEYS = set(FACTS) - SECTIONS


def keys(kind):
    return {key for key in KEYS if FACTS[key].resume == kind and not key.startswith("model.architecture.")}


def test_what_a_resumed_run_may_change_on_the_local_engine():
    free = {key for key in KEYS if key.partition(".")[0] in ("evaluation", "checkpoint", "logging")}
    assert keys("free") == free
    assert keys("length") == {"trainer.steps", "data.epochs"}
    memory = {f"trainer.{name}" for name in ("microbatch_tokens", "microbatch_prompts", "share_prompts")}
    assert keys("memory") == memory | {"model.gradient_checkpointing", "rollout.batch_responses"}


def test_what_a_resumed_run_must_not_change_on_mindspeed_rl():
    """``seq_length`` follows from two others; a checkpoint depends on the layout and the length."""
    of_a_checkpoint = (
        "tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
        "use_distributed_optimizer train_iters lr_warmup_fraction "
    )
    expected = {
        "coca": "method grader grading require_evaluated platform chat_template_kwargs prompt_date "
        "rollout_is_threshold",
        "megatron_training": f"{of_a_checkpoint}seed data_path tokenizer_name_or_path global_batch_size split "
        "no_shuffle seq_length",
        "actor_config": f"{of_a_checkpoint}lr lr_decay_style min_lr weight_decay clip_grad adam_beta1 adam_beta2",
        "rl_config": "init_kl_coef clip_ratio epochs mini_batch_size shuffle_mini_batch n_samples_per_prompt "
        "max_prompt_length verifier_function verifier_weight",
    }
    found = {key for key in identity_keys() if not key.startswith(("model.", "generate_config.sampling_config."))}
    assert found == {
        *("model", "generate_config.sampling_config"),
        *(f"{section}.{name}" for section, names in expected.items() for name in names.split()),
    }


@pytest.mark.parametrize(
    ("schema", "engine", "expected"),
    [
        (VerlSettings, "verl", set()),
        (CocaSettings, "mindspeed_rl", set()),
        (IntegrationSettings, "trl", {"method.clip", "method.loss_aggregation"}),
        (IntegrationSettings, "slime", {"method.clip", "method.loss_aggregation", "stage_shares"}),
        (
            IntegrationSettings,
            "ms_swift",
            {"method.clip", "method.loss_aggregation", "method.entropy_bonus", "stage_shares"},
        ),
    ],
)
def test_keys_that_an_engine_has_but_does_not_read(schema, engine, expected):
    assert unread_keys(schema, engine).keys() == expected
    assert not unread_keys(RunConfig, "local")


def test_what_a_resumed_run_must_not_change_on_verl():
    assert keys_of_identity(VerlSettings) == {"method", "grader", "grading", "require_evaluated"}


def test_a_key_below_a_free_form_section_has_the_facts_of_the_section():
    assert fact_of(FACTS, "mindspeed_rl.actor_config.lr") is FACTS["mindspeed_rl"]
    assert fact_of(FACTS, "optimizer.betas.0") is FACTS["optimizer.betas"]


def test_every_difference_is_named():
    before, now = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5, "c": 2}, "e": 4}
    with pytest.raises(ConfigError) as caught:
        check_resumed_settings(before, now, where="run.yaml", fix="", may_change=lambda key: key == "e")
    assert [problem[:3] for problem in caught.value.problems] == [("another-run", "a.b", 5), ("another-run", "d", None)]
    check_resumed_settings(before, before, where="run.yaml", fix="")
