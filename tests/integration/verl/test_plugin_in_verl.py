"""The plugin and the real verl in one process: registries, the reward manager, verl's defaults, edited sources."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
import verl.workers.config
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tracking import Tracking
from verl.workers.config import HFModelConfig

from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.data.export import verl_row
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.local.tiny_model import write_tiny_model
from coca_mindspeed.upstream.manifest import ManifestError, load_manifests, matching_manifest
from coca_mindspeed.utils import saving
from coca_mindspeed.utils.text_formats import value_of
from coca_mindspeed.verl.batch import score_step
from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.plan import verl_configuration
from coca_mindspeed.verl.requirements import REQUIREMENTS
from coca_mindspeed.verl.settings import TRAINERS, VerlSettings, verl_settings
from coca_mindspeed.verl.trainer import SegmentTrainer, SyncSegmentTrainer
from coca_mindspeed.verl.upstream_keys import readers
from tests.integration.verl import tiny
from tests.support.verl_keys import keys_of
from tests.support.waiting import Clock
from tests.verl.configurations import VERLS_DEFAULTS, columns, record, verls_defaults

pytestmark = pytest.mark.timeout(1800)  # with the warm-up of a model

VERL = Path(str(verl.__file__)).parent


@pytest.fixture(autouse=True)
def _rollout_engine_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loops this variable registers the engine ``host``, which is refused without it."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.support.verl_host")


def composed(directory: Path, name: str, *overrides: str) -> DictConfig:
    """As ``main_ppo --config-dir DIRECTORY --config-name NAME`` composes it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(directory), version_base=None):
        return compose(name, overrides=[f"hydra.searchpath=[file://{VERL / 'trainer' / 'config'}]", *overrides])


@pytest.mark.parametrize(("ours", "verls"), TRAINERS.items())
def test_verl_finds_the_trainers_which_extend_its_own(ours: str, verls: str):
    trainer, original = get_trainer_cls(ours), get_trainer_cls(verls)
    assert trainer.mro()[:3] == [trainer, SegmentTrainer, original]


def test_verl_finds_estimator_and_reward_manager():
    assert callable(get_adv_estimator_fn("coca"))
    assert get_reward_manager_cls("coca").__name__ == "SegmentRewardManager"


def test_the_plugin_is_imported_only_where_verl_needs_it():
    code = "import sys, verl; print([m for m in sys.modules if m.startswith('coca_mindspeed.verl.')])"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.splitlines()[-1] == "['coca_mindspeed.verl.register']"


class WithoutWorkers(SyncSegmentTrainer):
    """Our trainer as verl builds it, up to a checkpoint that holds nothing but its step; verl's stages have names."""

    def __init__(self, config: DictConfig, step: int = 0) -> None:
        super().__init__(config)
        self.global_steps = step

    def init(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._load_checkpoint()

    def save(self) -> None:
        self._save_checkpoint()

    def record(self, metrics: dict[str, Any]) -> None:
        self._compute_metrics(None, metrics, {}, global_steps=self.global_steps, epoch=0)

    def evaluate(self, reward_extra_infos: dict[str, Any], **others: Any) -> dict[str, float]:
        return self._val_metrics_update([], [], reward_extra_infos, [], **others)


@pytest.fixture
def without_workers(tmp_path: Path, monkeypatch: Any) -> Callable[..., WithoutWorkers]:
    """Makes one, from the arguments of ``tiny.configuration``."""
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda _: None)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.support.verl_host")  # which has the rollout engine
    tiny.write_model(tmp_path / "model")
    tiny.write_questions(tmp_path, "coca", train=40, evaluate=4)

    def make(step: int = 0, **keys: Any) -> WithoutWorkers:
        tiny.configuration(tmp_path, tmp_path / "run", **keys)
        trainer = WithoutWorkers(composed(tmp_path / "run", "run"), step)
        trainer.init()
        return trainer

    return make


def test_verls_own_file_logger_keeps_the_steps_before_a_checkpoint(
    without_workers: Callable[..., WithoutWorkers], tmp_path: Path, monkeypatch: Any
):
    log = tmp_path / "logs" / "metrics.jsonl"
    log.parent.mkdir()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def start(step: int, until: int) -> None:
        trainer = without_workers(step)
        trainer.logger = Tracking("coca", "run", ["console", "file"])
        trainer.on_validate_begin()
        trainer.on_train_begin()
        for number in range(step + 1, until + 1):
            trainer.logger.log(data={"a": np.float32(0.1), "b": float("nan"), "c": 1 / 3}, step=number)
        trainer.logger.finish()

    start(0, 5)
    before = log.read_bytes().splitlines()
    start(3, 6)
    start(6, 7)
    after = log.read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4, 5, 6, 7]
    assert after[:3] == before[:3]
    assert list(log.parent.iterdir()) == [log]


def test_the_estimator_names_the_trainer_mode_where_another_trainer_asks():
    with pytest.raises(TrainingError, match=r"trainer\.v1\.trainer_mode=coca"):
        get_adv_estimator_fn("coca")(token_level_rewards=torch.zeros(2, 3), response_mask=torch.ones(2, 3))


def flat(values: Any, under: str = "") -> dict[str, Any]:
    """Values by dotted keys; an empty section is a value."""
    if not isinstance(values, dict) or not values:
        return {under: values}
    return {
        key: leaf for name, part in values.items() for key, leaf in flat(part, f"{under}.{name}".lstrip(".")).items()
    }


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_the_keys_of_tests_without_verl_have_verls_own_defaults(engine: str):
    defaults: Any = OmegaConf.to_container(
        composed(VERL / "trainer" / "config", "ppo_trainer", f"model_engine={engine}"), resolve=False
    )
    for key, value in flat(OmegaConf.to_container(verls_defaults(engine))).items():
        assert value_of(defaults, key, "absent") == value, key
    for row in REQUIREMENTS:  # a key that this verl lacks is accepted so
        if value_of(defaults, row.key, "absent") == "absent":
            assert row.optional or None in row.accepts, row.key


def test_the_dataclasses_of_tests_without_verl_have_fields_of_verls_own():
    stub = importlib.util.spec_from_file_location("stub_config", VERLS_DEFAULTS.parents[1] / "workers" / "config.py")
    assert stub is not None
    assert stub.loader is not None
    module = importlib.util.module_from_spec(stub)
    sys.modules[stub.name] = module  # dataclasses look their module up
    stub.loader.exec_module(module)
    classes = {name: each for name, each in vars(module).items() if is_dataclass(each) and not name.startswith("_")}
    assert len(classes) == 6
    for name, each in classes.items():
        own = {field.name for field in fields(getattr(verl.workers.config, name))}
        assert {field.name for field in fields(each)} <= own, name


def test_the_trainer_refuses_what_verls_dataclasses_refuse(warm: Path, tmp_path: Path):
    for added in ("+actor_rollout_ref.rollout.gpu_memory_utilisation=0.5", "actor_rollout_ref.rollout.mode=sync"):
        tiny.configuration(warm, tmp_path)
        with pytest.raises(ConfigError) as caught:
            SyncSegmentTrainer(composed(tmp_path, "run", added))
        assert [problem.key for problem in caught.value.problems] == ["actor_rollout_ref.rollout"]


def test_the_trainer_refuses_before_anything_is_loaded(warm: Path, tmp_path: Path):
    tiny.configuration(warm, tmp_path, actor_rollout_ref__actor__entropy_coeff=0.1, algorithm__adv_estimator="grpo")
    with pytest.raises(ConfigError) as caught:
        SyncSegmentTrainer(composed(tmp_path, "run"))
    found = {(problem.key, problem.value) for problem in caught.value.problems}
    assert found == {("actor_rollout_ref.actor.entropy_coeff", 0.1), ("algorithm.adv_estimator", "grpo")}


@pytest.mark.parametrize(
    "name",
    [
        "qwen25_1p5b",
        "qwen25_3b",
        "qwen25_7b",
        "qwen25_7b_megatron",
        "llama3_8b",
        "qwen3_1p7b",
        "qwen3_8b",
        "qwen35_2b",
        "qwen35_4b",
    ],
)
def test_ready_made_configurations_compose_on_verls_defaults(name: str):
    file = find_verl_run(f"coca_{name}")
    assert file is not None
    config = verl_configuration(file, [])
    engine = "use_mbridge" if name.endswith("megatron") else "ulysses_sequence_parallel_size"
    actor = config["actor_rollout_ref"]["actor"]
    assert engine in {**actor, **actor.get("megatron", {})}, "verl's defaults are there"
    assert verl_problems(config, verl_settings(config)) == []
    assert verl_problems(verl_configuration(file, ["data.train_batch_size=100"]), verl_settings(config))


@pytest.mark.parametrize(
    ("line", "target", "refused"),
    [
        ("        metrics.update(actor_metrics)\n", "PPOTrainer._update_actor", True),
        ("        # perform validation before training\n", "PPOTrainer.fit", False),
    ],
)
def test_an_edited_contract_is_refused_and_another_text_is_a_warning(
    tmp_path: Path, capsys: Any, line: str, target: str, refused: bool
):
    shutil.copytree(VERL, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    assert matching_manifest(tmp_path, package="verl").release == "0.9.1"
    assert capsys.readouterr().err == ""
    edited = tmp_path / "verl" / "trainer" / "ppo" / "v1" / "trainer_base.py"
    source = edited.read_text()
    assert source.count(line) == 1
    edited.write_text(source.replace(line, line + "        print('edited')\n"))
    if not refused:
        assert matching_manifest(tmp_path, package="verl").release == "0.9.1"
        assert target in capsys.readouterr().err
        return
    with pytest.raises(ManifestError) as caught:
        matching_manifest(tmp_path, package="verl")
    assert "the verl at" in str(caught.value)
    assert f"{target} (expected" in str(caught.value)
    (manifest,) = load_manifests(package="verl")
    assert f"1 of {len(manifest.hooks)} hooked definitions differ from release 0.9.1" in str(caught.value)


@pytest.mark.parametrize("others", [{}, {"expected_acc_counts": {("sums", "acc"): 2}}])
def test_a_validation_passes_on_what_this_verl_gives(
    without_workers: Callable[..., WithoutWorkers], monkeypatch: Any, others: dict[str, Any]
):
    """``expected_acc_counts`` is new in 0.9.1: ours works with a verl that has it and with one that has not."""
    given = []
    monkeypatch.setattr(
        PPOTrainer,
        "_val_metrics_update",
        lambda _self, *arguments, **named: given.append((len(arguments), named)) or {},
    )
    trainer = without_workers(coca__broken_groups=1)
    report = {name: [value] for name, value in columns(0.5, Outcome.RIGHT).items()}
    found = trainer.evaluate(report | {"reward": [1.0]}, **others)
    assert given == [(4, others)]
    assert found["eval/missing"] == (1 if others else 0)
    assert found["eval/accuracy"] == 1


def test_a_step_of_two_mini_batches_is_measured_and_warned_about_as_one(
    without_workers: Callable[..., WithoutWorkers], monkeypatch: Any, capsys: Any
):
    """Through verl's own aggregation; the last step's validation counts with its step."""
    actor = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 8}
    trainer = without_workers(
        coca__broken_groups=1,
        data__train_batch_size=2,
        actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=8,
        **{f"actor_rollout_ref__actor__{key}": value for key, value in actor.items()},
    )
    trainer.trainer_mode, trainer.parameter_sync_step, trainer.prepare_step = "separate_async", 2, dict
    # The second mini-batch has four times the tokens.
    verdicts = {0: Outcome.RIGHT, 1: Outcome.WRONG}
    failed = [0, 1]
    sums = {0: {"tokens": 10.0, "kl": 1.0}, 1: {"tokens": 40.0, "kl": 14.0}}

    def step_once(self: Any, metrics: dict[str, Any], timing_raw: dict[str, Any], _size: int) -> KVBatchMeta:
        number = self.local_trigger_step
        keys = [f"{number}_0_0", f"{number}_1_0"]
        rows = [columns(0.5, verdicts[number])] * 2
        tags: list[dict[str, Any]] = [{}, {}]
        scored = {"keys": keys, "tags": tags, "rows": rows, "response_lengths": torch.tensor([5, 5]), "group": 2}
        self.scored.append(score_step(**scored, prompts=1, settings=VerlSettings(broken_groups=1), stage=0))
        timing_raw["adv"] = timing_raw.get("adv", 0) + 1.5
        metrics |= {f"actor/segment_sums/answer/{name}": value for name, value in sums[number].items()}
        metrics |= {"training/rollout_failure/evicted_samples": failed[number]}
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags)

    monkeypatch.setattr(PPOTrainer, "_step_once", step_once)
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: None)
    for trainer.global_steps in range(1, 6):
        found: dict[str, Any] = {}
        trainer.step(found, {})
        if trainer.global_steps == 5:
            found |= {"held_out/accuracy": 0.0, "held_out/confidence": 1.0, "held_out/gap_error": 0.01}
        trainer.record(found)
    assert found["rollout/ece"] == 0.0  # 0.5 in each mini-batch
    assert found["first_sight/gap_error"] == pytest.approx(0.5)  # undefined in each
    assert found["answer/kl"] == pytest.approx(15 / 50)
    assert found["seconds/advantage"] == 3.0
    assert found["rollout/times_asked"] == 1.0
    assert found["group/broken"] == 1
    assert not [name for name in found if "segment_sums" in name]
    assert "held-out" in capsys.readouterr().err
    failed = [1, 1]
    with pytest.raises(TrainingError, match="2 of 2 groups"):
        trainer.step({}, {})


@pytest.mark.parametrize(("minutes", "interval", "saved"), [(30, 3, [2, 3, 5]), (30, 100, [2, 4]), (None, 3, [3])])
def test_a_step_is_saved_by_the_clock_too(
    without_workers: Any, monkeypatch: Any, minutes: Any, interval: int, saved: Any
):
    """A step takes 20 minutes; a checkpoint by verl's interval starts them anew."""
    clock, saves = Clock(monkeypatch, saving), []
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: saves.append(self.global_steps))
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda _: None)
    trainer = without_workers(coca__checkpoint_minutes=minutes, trainer__total_training_steps=5)
    for trainer.global_steps in range(1, 6):
        clock.ahead += 20 * 60
        if trainer.global_steps % interval == 0:
            trainer.save()
        trainer.on_step_end()
    assert saves == saved


def test_the_reward_manager_judges_sampled_tokens(warm: Path, tmp_path: Path):
    tiny.configuration(warm, tmp_path)
    config = composed(tmp_path, "run")
    policy = tiny.load_tiny(warm / "model")

    async def judged() -> list[dict[str, Any]]:
        manager = get_reward_manager_cls("coca")(config, policy.tokenizer, None)
        said = ["<confidence>0.8</confidence>2", "<confidence>0.25</confidence>7", "2"]
        return await asyncio.gather(*(manager.run_single(_data(policy, text)) for text in said))

    right, wrong, invalid = asyncio.run(judged())
    assert right["reward_score"] == 1.0
    assert right["reward_extra_info"]["prediction"]["confidence"] == 0.8
    assert right["reward_extra_info"]["confidence_length"] == [5]
    assert wrong["reward_score"] == 0.0
    assert wrong["reward_extra_info"]["prediction"]["confidence"] == 0.25
    assert invalid["reward_extra_info"]["prediction"]["confidence"] is None


def test_verl_and_the_local_engine_train_the_same_rows_of_the_embedding(tmp_path: Path):
    """Lookups of a model's padding token train no row, any token may be sampled, and verl chooses which one pads."""
    tiny.write_model(tmp_path / "tiny")
    write_tiny_model(tmp_path / "narrow", seed=0)
    tiny.widen_model(tmp_path / "narrow", tmp_path / "wide")
    for model in (tmp_path / "tiny", tmp_path / "wide"):
        config = HFModelConfig(path=str(model), override_config={"attn_implementation": "sdpa"}).hf_config
        verls = AutoModelForCausalLM.from_config(config)
        ours = tiny.load_tiny(model).model
        assert ours.get_input_embeddings().padding_idx == verls.get_input_embeddings().padding_idx


def _data(policy: Any, response: str) -> DataProto:
    row = verl_row(record(1), None, 0)
    responses = torch.tensor([policy.tokenizer(response, add_special_tokens=False)["input_ids"]])
    prompts = torch.zeros(1, 3, dtype=torch.int64)
    return DataProto(
        batch=TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "attention_mask": torch.ones(1, 3 + responses.shape[1], dtype=torch.int64),
            },
            batch_size=1,
        ),
        non_tensor_batch={
            "extra_info": np.array([row["extra_info"]], dtype=object),
            "response_len": np.array([responses.shape[1]]),
        },
    )


def test_the_shipped_readers_are_those_of_this_verl():
    """``python -m tests.support.verl_keys SITE_PACKAGES`` writes them anew."""
    installed = keys_of(Path(verl.__file__).parents[1])
    assert {key: reader for key, reader in installed.items() if readers().get(key, "absent") != reader} == {}
    assert readers().keys() == installed.keys()
