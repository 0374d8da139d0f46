"""Time and host memory of a run: hand-computed."""

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.cost import host_gib, nodes_for_budget, run_time
from coca_mindspeed.mindspeed.resolved_config import resolve_config


def resolved_of(name, *overrides):
    return resolve_config(compose_run(name, overrides).run)


def test_time_of_the_papers_run():
    """2,048 responses x 750 tokens / (16 NPUs x 110 tokens/s) = 873 s; 1,961 iterations are 19.8 days."""
    estimate = run_time(resolved_of("qwen25_7b_910c"), 1961)
    assert estimate.iteration_seconds == pytest.approx(2048 * 750 / 1760)
    assert estimate.days == pytest.approx(19.8, abs=0.05)
    assert run_time(resolved_of("qwen25_7b_910c"), None).days is None
    twice = run_time(resolved_of("qwen25_7b_910c"), 1961, tokens_per_response=1500, tokens_per_second=220)
    assert twice.days == pytest.approx(estimate.days)


@pytest.mark.parametrize(("days", "nodes"), [(25, 1), (19, 2), (10, 2), (5, 4), (0.1, None)])
def test_nodes_for_a_budget(days, nodes):
    """19.8 days on one node; 128 prompts cannot be split over 3 nodes of 16 / TP 4 = 12 ranks."""
    resolved = resolved_of("qwen25_7b_910c")
    assert nodes_for_budget(resolved, run_time(resolved, 1961), days) == nodes


@pytest.mark.parametrize(("name", "gib"), [("qwen25_7b_910b", 227), ("qwen25_7b_910c", 369)])
def test_host_memory_of_a_node(name, gib):
    """7.62e9 parameters: 12 bytes each once, 2 bytes each on every rank for vLLM, 2 bytes / TP 4 on every rank."""
    assert host_gib(resolved_of(name)) == pytest.approx(gib, abs=1)


def test_host_memory_by_hand():
    resolved = resolved_of("qwen25_7b_910b")
    parameters = 7_615_616_512
    expected = 12 * parameters + 8 * 2 * parameters + 8 * 2 * parameters / 4
    assert host_gib(resolved) == pytest.approx(expected / 2**30)
    without = resolved_of("qwen25_7b_910b", "mindspeed_rl.generate_config.offload_train_optimizer=false")
    assert host_gib(without) == pytest.approx((expected - 12 * parameters) / 2**30)
    two = resolved_of("qwen25_7b_910b", "hardware.nodes=2")
    assert host_gib(two) == pytest.approx((expected - 6 * parameters) / 2**30)
