"""slime's hooks with small stand-ins for slime's functions; slime's own: tests/integration/slime."""

import asyncio
import copy
import dataclasses
import enum
import math
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.integrations import slime, slime_requirements
from coca_mindspeed.integrations.slime_requirements import REQUIREMENTS, check_package
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.upstream.manifest import ManifestError, load_manifests, manifest_of
from tests.support.slime_rollout import (
    CORRECT,
    GRADER,
    GROUP,
    METHOD,
    OPTIONS,
    SAID,
    TOKENIZER,
    library_advantages,
    response,
    rows,
    tokens_of,
)


@dataclasses.dataclass
class Sample:
    """The fields of slime's that the hooks read."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    group_index: int
    index: int
    prompt: object
    tokens: list
    response_length: int
    rollout_log_probs: list | None
    reward: object = None
    loss_mask: list | None = None
    status: Status = Status.COMPLETED
    metadata: dict = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "grader.py").write_text(GRADER)
    return folder


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    """Slime without context parallelism: a sequence is not cut, and the reducer adds up."""
    cp_utils = types.ModuleType("slime.backends.megatron_utils.cp_utils")
    cp_utils.slice_log_prob_with_cp = lambda values, total, response: values
    cp_utils.get_sum_of_sample_mean = lambda *lists, calculate_per_token_loss: calculate_per_token_loss
    monkeypatch.setitem(sys.modules, cp_utils.__name__, cp_utils)
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(slime, "check_package", lambda args: None)
    monkeypatch.setattr(slime, "HEALTH", HealthWarnings())


def options(folder, method=(), **changed):
    given = {
        **OPTIONS,
        "coca": {"grader": f"{folder / 'grader.py'}:grade", "method": METHOD | dict(method)},
        "hf_checkpoint": str(folder / "model"),
        "compute_advantages_and_returns": True,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": GROUP,
        "rollout_batch_size": 2,
        "global_batch_size": 8,
    }
    return types.SimpleNamespace(**{**given, **changed})


def samples_of(args, said=SAID):
    """Sampled and rewarded, as slime does it: all at once."""
    samples = []
    for group, (texts, row) in enumerate(zip(said, rows(), strict=True)):
        prompt = "".join(message["content"] for message in row["prompt"])
        for text in texts:
            ids, log_probs = response(text)
            given = tokens_of("1+1=") + ids, len(ids), log_probs
            samples.append(Sample(group, len(samples), prompt, *given, metadata=dict(row["metadata"])))

    async def all_rewards():
        return await asyncio.gather(*(slime.reward(args, sample) for sample in samples))

    for sample, reward in zip(samples, asyncio.run(all_rewards()), strict=True):
        sample.reward = reward
    return samples


@pytest.mark.parametrize("method", [{}, {"entropy_bonus": 0.02, "advantage_scale": "batch"}])
def test_rewards_carry_the_advantages_of_the_library(folder, method):
    args = options(folder, method)
    samples = samples_of(args)
    assert [sample.reward for sample in samples] == [float(verdict is True) for verdict in CORRECT]
    raw, advantages = slime.give_credit(args, samples)
    expected, of_tokens = library_advantages(samples, CORRECT, **method)
    assert raw == [float(verdict is True) for verdict in CORRECT]
    assert all(torch.equal(one, other) for one, other in zip(advantages, of_tokens, strict=True))
    order = [5, 0, 7, 2, 4, 1, 6, 3]
    _, shuffled = slime.give_credit(args, [samples[index] for index in order])
    assert all(torch.equal(one, of_tokens[index]) for one, index in zip(shuffled, order, strict=True))
    extra = {"rollout/other": 1.0}
    assert slime.log_metrics(0, args, samples, extra, 1.0) is False
    logged = {name: value for name, value in expected.metrics.items() if not math.isnan(value)}
    cut = {"rollout/coca/response/cut_off_share": 0.0, "rollout/other": 1.0}
    assert extra == cut | {f"rollout/coca/{name}": value for name, value in logged.items()}
    data = {
        "rewards": list(advantages),
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "kl": [torch.zeros(sample.response_length, dtype=torch.float32) for sample in samples],
    }
    slime.token_advantages(args, data)
    assert all(torch.equal(one, other) for one, other in zip(data["advantages"], of_tokens, strict=True))
    assert data["rewards"] == pytest.approx([float(one.mean()) for one in of_tokens])
    assert slime.sum_over_tokens([], [], [], False) is True


def test_aborted_responses_are_left_out_and_other_reward_functions_give_verdicts(folder):
    args = options(folder)
    samples = samples_of(args)
    other = copy.deepcopy(samples)
    for sample, verdict in zip(other, CORRECT, strict=True):
        sample.metadata, sample.reward = {}, None if verdict is None else int(verdict)
    _, of_tokens = library_advantages(samples, CORRECT)
    assert all(map(torch.equal, slime.give_credit(args, other)[1], of_tokens))
    aborted = samples[1]
    aborted.status, aborted.reward, aborted.rollout_log_probs = Sample.Status.ABORTED, None, None
    aborted.tokens, aborted.response_length = aborted.tokens[: -aborted.response_length], 0
    _, without = library_advantages(samples, [True, None, *CORRECT[2:]])
    found = slime.give_credit(args, samples)[1]
    assert len(found[1]) == 0
    assert all(map(torch.equal, found, without))
    assert not torch.equal(found[0], of_tokens[0])
    samples[0].metadata, samples[0].reward = {}, -1.0
    with pytest.raises(ConfigError):
        slime.give_credit(args, samples)


def test_samples_that_cannot_be_credited_are_refused(folder):
    args = options(folder)
    samples = samples_of(args)
    for broken in (samples[:-1], [dataclasses.replace(samples[0], loss_mask=[1, 0, 1]), *samples[1:]]):
        with pytest.raises(DataError):
            slime.give_credit(args, broken)
    silent = [dataclasses.replace(samples[0], rollout_log_probs=None), *samples[1:]]
    with pytest.raises(DataError):
        slime.give_credit(options(folder, {"entropy_bonus": 0.1}), silent)
    for prompt, error in (("1 + 1", DataError), (f"{samples[0].prompt}<think>\n", ConfigError)):
        with pytest.raises(error):
            asyncio.run(slime.reward(args, dataclasses.replace(samples[0], prompt=prompt)))


def test_responses_that_arrive_together_are_graded_together(folder, monkeypatch):
    batches = []

    class Counting(slime.RowGrader):
        def grade(self, texts, answers):
            batches.append(len(answers))
            time.sleep(0.05)
            return super().grade(texts, answers)

    monkeypatch.setattr(slime, "RowGrader", Counting)
    args = options(folder)
    samples_of(args, [SAID[0] * 32, SAID[1] * 32])
    assert batches == [256]
    samples = samples_of(args)
    batches.clear()
    assert asyncio.run(slime.reward(args, samples)) == [float(verdict is True) for verdict in CORRECT]
    assert batches == [8]


CHANGES = [
    ({"coca": None}, {("settings", "coca")}),
    ({"custom_reward_post_process_path": None}, {("hooks", "custom_reward_post_process_path")}),
    ({"custom_advantage_function_path": "mine.f"}, {("hooks", "custom_advantage_function_path")}),
    ({"custom_pg_loss_reducer_function_path": "mine.f"}, {("hooks", "custom_pg_loss_reducer_function_path")}),
    ({"custom_pg_loss_reducer_function_path": None}, set()),
    ({"custom_convert_samples_to_train_data_path": "mine.f"}, {("hooks", "custom_convert_samples_to_train_data_path")}),
    ({"compute_advantages_and_returns": False}, {("hooks", "compute_advantages_and_returns")}),
    ({"loss_type": "custom_loss"}, {("hooks", "loss_type")}),
    *(
        ({"advantage_estimator": name}, {("estimator", "advantage_estimator")})
        for name in ("gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "on_policy_distillation")
    ),
    ({"advantage_estimator": "cispo"}, set()),
    ({"normalize_advantages": True}, {("estimator", "normalize_advantages")}),
    ({"kl_coef": 0.1}, {("estimator", "kl_coef")}),
    ({"kl_coef": 0.0, "use_opd": False, "use_opsm": False, "qkv_format": "thd"}, set()),
    ({"use_opd": True}, {("estimator", "use_opd")}),
    ({"use_opsm": True}, {("segments", "use_opsm")}),
    ({"custom_tis_function_path": "examples.mis.f"}, {("segments", "custom_tis_function_path")}),
    ({"custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}, set()),
    ({"custom_tis_function_path": "vime.backends.megatron_utils.loss.icepop_function"}, set()),
    ({"use_score_centering": True}, {("segments", "use_score_centering")}),
    ({"qkv_format": "bshd"}, {("segments", "qkv_format")}),
    (
        {"dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"},
        {("groups", "dynamic_sampling_filter_path")},
    ),
    ({"dynamic_sampling_filter_path": "mine.f"}, set()),
    ({"mask_offpolicy_in_partial_rollout": True}, {("segments", "mask_offpolicy_in_partial_rollout")}),
    ({"n_samples_per_prompt": 1}, {("groups", "n_samples_per_prompt"), ("groups", "global_batch_size")}),
    ({"global_batch_size": 3}, {("groups", "global_batch_size")}),
    ({"global_batch_size": 4}, set()),
    ({"reward_key": "score"}, {("rewards", "reward_key")}),
    ({"rollout_top_p": 0.9, "rollout_top_k": 20}, {("sampling", "rollout_top_p"), ("sampling", "rollout_top_k")}),
]


@pytest.mark.parametrize(("changed", "problems"), CHANGES)
def test_options_that_change_the_method_are_refused(folder, changed, problems):
    args = options(folder, **changed)
    if not problems:
        slime.check(args)
        return
    with pytest.raises(ConfigError) as refusal:
        slime.check(args)
    assert {(problem.code, problem.key) for problem in refusal.value.problems} == problems


def test_each_requirement_is_refused_by_a_case():
    assert {row.key for row in REQUIREMENTS} == {key for _, problems in CHANGES for _, key in problems}


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"methd": {}}, ["coca.methd"]),
        ({"method": {"clip": 0.3}}, ["coca.method.clip"]),
        ({"method": {"name": "caliber"}}, ["coca.stage"]),
        ({"method": {"name": "caliber"}, "stage": 1}, []),
        ({"stage_shares": [1]}, ["coca.stage_shares"]),
    ],
)
def test_the_section_is_checked_with_the_options(folder, section, keys):
    args = options(folder, coca=section)
    if not keys:
        slime.check(args)
        return
    with pytest.raises(ConfigError) as refusal:
        slime.check(args)
    assert [problem.key for problem in refusal.value.problems] == keys


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_packages_without_the_hook_are_refused_by_name(monkeypatch, name):
    if name != "slime":
        monkeypatch.setitem(sys.modules, f"{name}.utils.misc", types.ModuleType(name))
    with pytest.raises(ConfigError, match=f"^{name} "):
        check_package(types.SimpleNamespace(custom_rm_path="f"))


def test_vime_is_taken_by_its_own_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "vime.utils.misc", types.ModuleType("vime.utils.misc"))
    assert slime_requirements.package() == "vime"
    check_package(types.SimpleNamespace(custom_advantage_function_path="f"))


def test_a_slime_of_other_sources_is_refused(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ManifestError, match="compute_advantages_and_returns"):
        check_package(types.SimpleNamespace(custom_advantage_function_path="f"))


def test_manifests_differ_in_what_a_release_lacks_alone():
    targets = {
        manifest.release: {hook.target.rpartition(":")[2] for hook in manifest.hooks}
        for manifest in load_manifests(package="slime")
    }
    assert targets.keys() == {"0.3.0", "0.3.1", "main"}
    assert targets["0.3.1"] - targets["0.3.0"] == {"compute_cispo_loss"}
    assert targets["0.3.1"] - targets["main"] == {"_log_rollout_data"}
    assert manifest_of("main", package="slime").commit == "624b824a8"


def test_the_adapter_is_short():
    assert len(Path(slime.__file__).read_text(encoding="utf-8").splitlines()) <= 180
    named = [row.accepts[0] for row in REQUIREMENTS if row.code == "hooks" and str(row.key).endswith("function_path")]
    assert named
    assert all(hasattr(slime, name.removeprefix(f"{slime.__name__}.")) for name in named)
