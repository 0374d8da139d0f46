"""The class of each key of verl's configuration: read, set by us, without effect, or verl's own with a reader."""

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.verl.plan import make_plan
from coca_mindspeed.verl.requirements import CHECKED, SHOWN
from coca_mindspeed.verl.upstream_keys import SET_BY_LAUNCH, classes, leaves, readers
from tests.verl.configurations import verls_defaults

pytestmark = pytest.mark.usefixtures("verls_keys")

ROLLOUT = "actor_rollout_ref.rollout"
# Fields of verl's dataclasses, or keys that its trainer asks for, which its YAML files do not list.
UNLISTED = {
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
    f"{ROLLOUT}.repetition_penalty",
    "trainer.v1.colocate_async.parameter_sync_step",
    "trainer.v1.sync.parameter_sync_step",
}


def test_each_key_has_a_class_and_each_of_verls_own_a_reader():
    assert {*CHECKED, *SHOWN, *SET_BY_LAUNCH} - readers().keys() == UNLISTED
    kinds = {key: classes().of(key) for key in readers()}
    assert {*kinds.values()} == {"read", "set", "none", "upstream"}
    assert not SHOWN & {*CHECKED, *SET_BY_LAUNCH}
    for key, kind in kinds.items():
        if kind == "upstream":
            assert readers()[key] is not None, key
        if kind == "none" and key not in CHECKED:
            assert readers()[key] is None, key


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_the_stub_has_verls_keys(engine):
    stub = {key for key, _ in leaves(OmegaConf.to_container(verls_defaults(engine)))}
    assert stub <= readers().keys() | UNLISTED


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("critic.optim.lr", "none"),
        ("critic.strategy", "upstream"),  # read beside the critic
        ("critic.enable", "read"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "none"),
        ("actor_rollout_ref.actor.grad_clip", "none"),
        ("actor_rollout_ref.actor.pad_to_length", "upstream"),  # the default of the engine's key
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "upstream"),
        ("actor_rollout_ref.model.lora.target_modules", "upstream"),  # passed on with its section
        ("actor_rollout_ref.actor.optim.muon_momentum", "upstream"),  # listed by its name
        ("trainer.balance_batch", "none"),
        ("trainer.default_local_dir", "set"),
        ("data.shuffle", "read"),
        (f"{ROLLOUT}.engine_kwargs.vllm.enable_lora", "upstream"),  # below a key that takes anything
    ],
)
def test_classes(key, expected):
    assert classes().of(key) == expected


@pytest.mark.parametrize(
    ("override", "codes", "noted"),
    [
        ("data.return_raw_chat=false", [], True),
        (f"{ROLLOUT}.gpu_memory_utilization=0.5", [], False),  # verl's default
        ("critic.strategy=fsdp2", [], True),
        ("data.reward_fn_key=x", [("no-effect", "data.reward_fn_key")], False),
        ("reward_model.enable=null", [], False),
    ],
)
def test_keys_without_effect_are_refused_and_verls_own_are_named(override, codes, noted):
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    plan = make_plan(file, [override])
    assert [(problem.code, problem.key) for problem in plan.problems] == codes
    assert any(override.partition("=")[0] in note for note in plan.notes) is noted
