"""The whole loop of MindSpeed-RL's ``train``, hooked, over Ray and gloo: it runs, it learns, it fails loudly.

Every test starts the driver as users do, with a tiny model on the host platform.  None of this touches an NPU.
"""

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SCORES
from coca_mindspeed.mindspeed.start.process import CPU_SHIM
from coca_mindspeed.scoring.rollout import Sampled, confidence_log_probs
from tests.integration import custom_code
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import needs_mindspeed
from tests.integration.mindspeed.runs import (
    BUSY_SECONDS,
    copy_of,
    finish,
    going_on,
    json_lines,
    metrics_of,
    run_and_check,
    start_driver,
    wait_for_checkpoint,
)

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

PINNED = "MINDSPEED_PINNED_PYTHON"  # an interpreter with Python 3.10, torch 2.5.1, Ray 2.42.1, transformers 4.52.1
MASTER = "MINDSPEED_RL_MASTER_HOME"
LEARNING_ITERATIONS = 100


THINKING = "thinking"
UPSTREAM_VERIFIER = "a verifier of MindSpeed-RL"  # right is what stands in a box; the tiny model cannot draw one
# What differs from tiny.configuration, section by section.
SEPARATE = {
    "rl_config": {"use_integrated_worker": False, "reference_resource": {"num_npus": 1}},
    "ref_config": {"model": "tiny", "micro_batch_size": 32},
    "reward_config": {"model": "tiny", "micro_batch_size": 32},
}
LAYOUTS = {
    "TP1": {},
    "TP2": {
        "actor_config": {"tensor_model_parallel_size": 2},
        "rl_config": {"actor_resource": {"num_npus": 2}, "guarantee_order": True, "zmq_communication": True},
        "coca": {"rollout_is_threshold": 2.0},
    },
    "PP2": {
        "actor_config": {"pipeline_model_parallel_size": 2},
        "rl_config": {"actor_resource": {"num_npus": 2}, "mini_batch_size": 8},
    },
    "DP2": {
        "actor_config": {"micro_batch_size": 16},
        "rl_config": {
            "actor_resource": {"num_npus": 2},
            "adv_dispatch_size": 32,
            "reward_dispatch_size": 64,
            "blocking": False,
        },
        "coca": {
            "grader": "math",
            "method": {**tiny.METHOD, "advantage_scale": "batch"},  # of 128 rows, of which 32 are dispatched at a time
        },
    },
    "separate workers": SEPARATE,
    THINKING: {
        "coca": {"method": {**tiny.METHOD, "thinking": True}},
        "generate_config": {"sampling_config": {**tiny.SAMPLING, "max_tokens": 36}},
    },
    UPSTREAM_VERIFIER: {"rl_config": {"verifier_function": ["acc"]}},
}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != THINKING])
def test_the_loop_runs_at(layout, warm, tmp_path, ray_directory):
    rows = run_and_check(warm, tmp_path, ray_directory, LAYOUTS[layout])
    assert "reference" not in "".join(key for row in rows for key in row)
    assert all(("advantage/deviation" in row) == (layout == "DP2") for row in rows)
    assert all((row["reward/answer"] > 0) == (layout != UPSTREAM_VERIFIER) for row in rows)
    weights = [row["rollout/is_weight"] for row in rows if "rollout/is_weight" in row]
    assert weights == pytest.approx([1.0] * 3 * (layout == "TP2"), abs=1e-3)  # both engines are transformers on a CPU


@pytest.mark.parametrize(("method", "stage"), [("dcpo", 0), ("caliber", 0), ("caliber", 1)])
def test_a_method_with_a_confidence_after_the_answer(method, stage, tmp_path, ray_directory):
    warm = tmp_path / "warm"
    (warm / "model").mkdir(parents=True)
    tiny.write_model(warm / "model", warm_up_steps=300, method=method)
    tiny.write_questions(warm)
    coca = {"method": {**tiny.METHOD, "name": method}, "stage": stage}
    layout = {**LAYOUTS["TP2"], "generate_config": {"sampling_config": {**tiny.SAMPLING, "max_tokens": 24}}}
    rows = run_and_check(warm, tmp_path / "run", ray_directory, {**layout, "coca": coca})
    after = "confidence_after" if method == "caliber" else "confidence"
    for row in rows:
        assert row[f"response/{after}_length"] > 1
        assert row["rollout/invalid_share"] < 0.5
        assert row[f"{after}/entropy"] > 0


@pytest.mark.parametrize("layout", ["TP1", "DP2", THINKING])
def test_the_entropy_bonus_is_that_of_the_local_credit(layout, request, tmp_path, ray_directory):
    """The advantages in the dock, from the sampled tokens and the rollout's log-probs, read and credited anew."""
    warm = request.getfixturevalue("warm_thinking" if layout == THINKING else "warm")
    method = {**LAYOUTS[layout].get("coca", {}).get("method", tiny.METHOD), "entropy_bonus": 0.05}
    changes = {**LAYOUTS[layout], "coca": {**LAYOUTS[layout].get("coca", {}), "method": method}}
    shim = {CPU_SHIM: "tests.integration.mindspeed.keeping", "COCA_TEST_ADVANTAGES": str(tmp_path / "kept")}
    rows = run_and_check(warm, tmp_path / "run", ray_directory, changes, **shim)
    policy = load_policy(warm / "model", compose_run("demo").run.model, torch.device("cpu"))
    settings = method_settings(**method)
    kept = {"read": [], "written": []}
    for file in sorted((tmp_path / "kept").iterdir(), key=lambda file: file.stat().st_mtime_ns):
        kept[file.stem.split("_")[2]].append(torch.load(file, weights_only=False))
    for row in rows:
        iteration = {name: {} for name in ("responses", "advantages", ROLLOUT_LOG_PROBS, SCORES["correct"])}
        for part in ("read", "written"):
            while len(iteration["advantages" if part == "written" else "responses"]) < 16 * 8:
                portion = kept[part].pop(0)
                for name in iteration.keys() & portion.keys():
                    iteration[name].update(zip(portion["indexes"], portion[name], strict=True))
        columns = {name: [values[index] for index in range(16 * 8)] for name, values in iteration.items()}
        lengths = torch.tensor(list(map(len, columns["advantages"])))
        ids = pad_sequence(columns["responses"], batch_first=True).long()
        sampled = Sampled(token_ids=ids, lengths=lengths)
        parsed = sampled.read(policy.text, settings)
        scored = parsed.scored(torch.stack(columns[SCORES["correct"]])[:, 0])
        rule, of_tokens = CreditRule(settings, 0), pad_sequence(columns[ROLLOUT_LOG_PROBS], batch_first=True)
        log_probs = confidence_log_probs(rule, of_tokens, scored.segment_ends)
        expected = scored.give_credit(rule, 8, log_probs=log_probs).token_advantages
        found = pad_sequence(columns["advantages"], batch_first=True)
        torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=0, atol=1e-5)
        entropy = -float(log_probs.sum() / scored.segment_ends[:, 0].sum())
        assert row["confidence/entropy"] == pytest.approx(entropy, abs=1e-3)  # of the training engine's log-probs
        assert (row.get("response/open_thought_share", 1) < 0.5) == (layout == THINKING)
        plain = CreditRule(replace(settings, entropy_bonus=0.0), 0)
        assert not torch.allclose(expected, scored.give_credit(plain, 8).token_advantages)
    assert not kept["read"]
    assert not kept["written"]


def test_a_grader_and_a_method_of_ones_own_reach_every_worker(warm, tmp_path, ray_directory):
    coca = {
        "grader": f"{custom_code.__file__}:last_digit",
        "method": {**tiny.METHOD, "name": f"{custom_code.__file__}:Shy"},
    }
    run_and_check(warm, tmp_path / "run", ray_directory, {"coca": coca})
    samples = json_lines(tmp_path / "run" / "output" / "samples" / "iteration_000002.jsonl")
    assert any(row["answer_advantage"] for row in samples)
    for row in samples:
        assert row["answer_advantage"] == pytest.approx(row["confidence_advantage"], abs=1e-6)


@pytest.mark.parametrize("mode", ["integrated", "separate"])
def test_with_a_kl_term_the_reference_is_what_training_began_with(mode, warm, tmp_path, ray_directory):
    """MindSpeed-RL's own reference, in both of its modes; both models load the same Megatron checkpoint."""
    directory = copy_of(warm, tmp_path / "first")
    config = tiny.configuration(directory, megatron_training={"train_iters": 1})
    finish(start_driver(directory, config, ray_directory), directory)
    weights = {"load": str(directory / "checkpoints")}

    separate = SEPARATE if mode == "separate" else {}
    changes = {
        "actor_config": weights,
        "rl_config": {**separate.get("rl_config", {}), "init_kl_coef": 0.05, "mini_batch_size": 16},
    }
    if mode == "separate":
        changes |= {"ref_config": {**SEPARATE["ref_config"], **weights}, "reward_config": SEPARATE["reward_config"]}
    rows = run_and_check(warm, tmp_path / "second", ray_directory, changes)
    penalties = [row["actor/kl_loss"] for row in rows]
    assert abs(penalties[0]) < 1e-6  # the policy is the reference
    assert min(penalties[1:]) > 1e-6
    assert any("reference" in key for key in rows[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_say_how_sure_it_is(seed, tmp_path, ray_directory):
    """Confidence reward up and batch ECE down, first against last ten iterations of a run on arithmetic.

    MindSpeed-RL draws the order of the prompts anew in every run: the reward came to .31 to .63 of what it was.
    """
    (tmp_path / "model").mkdir()
    tiny.write_model(tmp_path / "model", seed=seed, warm_up_steps=700)
    tiny.write_questions(tmp_path, seed=seed)
    config = tiny.configuration(
        tmp_path,
        megatron_training={"train_iters": LEARNING_ITERATIONS, "global_batch_size": 32, "seed": seed + 1},
        rl_config={"mini_batch_size": 32},
        actor_config={"lr": 1.0e-3, "micro_batch_size": 256},
    )
    finish(start_driver(tmp_path, config, ray_directory), tmp_path, timeout=1500)
    rows = metrics_of(tmp_path)
    assert len(rows) == LEARNING_ITERATIONS

    def mean(name, part):
        return sum(row[name] for row in part) / len(part)

    before, after = rows[:10], rows[-10:]
    for name in ("reward/confidence", "rollout/ece", "reward/answer", "rollout/confidence"):
        print(f"seed {seed}: {name} {mean(name, before):.3f} -> {mean(name, after):.3f}")
    assert mean("reward/confidence", after) > 0.75 * mean("reward/confidence", before)  # both are negative
    assert mean("rollout/ece", after) < 0.6 * mean("rollout/ece", before)
    assert mean("reward/answer", after) > mean("reward/answer", before) - 0.05


@pytest.mark.skipif(MASTER not in os.environ, reason=f"needs a checkout of MindSpeed-RL's master: {MASTER} not set")
def test_the_loop_runs_on_master(warm, tmp_path, ray_directory):
    run_and_check(warm, tmp_path, ray_directory, {}, MINDSPEED_RL_HOME=os.environ[MASTER])


@pytest.mark.skipif(
    PINNED not in os.environ, reason=f"needs upstream's pinned packages (docs/port.md): {PINNED} not set"
)
def test_the_loop_runs_on_the_pinned_versions(warm, tmp_path, ray_directory):
    run_and_check(warm, tmp_path, ray_directory, {}, python=os.environ[PINNED])


def test_an_edited_mindspeed_rl_is_refused_before_anything_starts(warm, tmp_path):
    directory = copy_of(warm, tmp_path / "run")
    edited = tmp_path / "edited"
    original = Path(os.environ["MINDSPEED_RL_HOME"])
    for part in ("cli", "configs", "mindspeed_rl"):
        shutil.copytree(original / part, edited / part, ignore=shutil.ignore_patterns("__pycache__"))
    loss = edited / "mindspeed_rl" / "models" / "loss" / "base_loss_func.py"
    loss.write_text(loss.read_text().replace("skip_entropy=True", "skip_entropy=False"))
    process = start_driver(directory, tiny.configuration(directory), "/nonexistent", MINDSPEED_RL_HOME=str(edited))
    assert process.wait(timeout=BUSY_SECONDS) == 1
    log = (directory / "log").read_text()
    assert "mindspeed_rl.models.loss.base_loss_func:BaseLossFunc (expected" in log
    assert "Ray" not in log


def test_a_killed_worker_ends_the_run_and_a_resume_goes_on(warm, tmp_path, ray_directory):
    directory = copy_of(warm, tmp_path)
    config = tiny.configuration(directory, megatron_training={"train_iters": 20, "save_interval": 2})
    process = start_driver(directory, config, ray_directory)
    marker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for_checkpoint(process, marker)
    log = (directory / "log").read_text(errors="replace")
    (pid,) = set(re.findall(r"\(ActorWithoutReference pid=(\d+)\)", log))
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(timeout=BUSY_SECONDS) == 1
    log = (directory / "log").read_text(errors="replace")
    assert re.search(r"coca-mindspeed: training ended: .*ActorDiedError.*ActorWithoutReference", log)
    assert f"resume from the last checkpoint in {directory / 'checkpoints'}" in log
    finish(start_driver(directory, going_on(config, directory), ray_directory), directory)
    assert [row["step"] for row in metrics_of(directory)] == list(range(1, 21))
