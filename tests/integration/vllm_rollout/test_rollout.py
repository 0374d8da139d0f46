"""What the default suite asks of a stand-in, asked of vLLM itself: its build for CPUs, in an environment of its own."""

import os
from pathlib import Path

import pytest

from tests.local import rollout_by_vllm as expected

pytestmark = [
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="vLLM has its own environment: make test-vllm-rollout"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    return expected.write_model(tmp_path_factory.mktemp("warm"), warm_up_steps=60)


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory):
    """A run that was never stopped."""
    output = tmp_path_factory.mktemp("whole") / "run"
    expected.trains(warm, output, largest_gap=1e-3)
    return output


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_and_log_probs_are_the_policys_before_and_after_a_step(tmp_path, tied):
    directory = expected.write_model(tmp_path / "model", tied=tied)
    expected.agrees_before_and_after_a_step(expected.policy_of(directory), directory, tmp_path / "log")


def test_adapters_arrive_merged_and_a_full_disk_for_its_output_stops_nothing(tmp_path):
    pytest.importorskip("peft")
    directory = expected.write_model(tmp_path / "model")
    expected.agrees_before_and_after_a_step(expected.policy_of(directory, rank=4), directory, Path("/dev/full"))


def test_a_run_has_gradients_and_a_small_gap(whole):
    """Asserted where it is made."""
    gaps = [row["rollout/log_prob_gap_max"] for row in expected.rows(whole / "metrics.jsonl")]
    print(f"largest gap of a token in each step: {gaps}")


def test_an_update_that_is_not_told_shows(tmp_path, warm, monkeypatch):
    expected.a_run_without_hand_overs_shows_it(warm, tmp_path / "run", monkeypatch)


def test_a_killed_trainer_takes_vllm_along_and_resumes_to_the_same_bytes(tmp_path, warm, whole):
    expected.a_killed_trainer_takes_vllm_along_and_resumes_to_the_same_bytes(warm, whole, tmp_path / "run")


def test_a_vllm_that_dies_is_named_and_the_run_goes_on_later(tmp_path, warm):
    expected.a_vllm_that_dies_is_named(warm, tmp_path / "run")
    assert len(expected.whole_run(warm, tmp_path / "run", "evaluation.interval=0", resume=True)) == 6
