"""Time and host memory of a run: hand-computed."""

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import DataError
from coca_mindspeed.mindspeed.memory_estimate import host_gib
from coca_mindspeed.mindspeed.plan import (
    Rates,
    fastest_layout,
    iteration_seconds,
    layouts_for_budget,
    read_rates,
    run_days,
)
from coca_mindspeed.mindspeed.resolved_config import resolve_config


def resolved_of(name, *overrides):
    return resolve_config(compose_run(name, overrides).run)


def test_time_of_the_papers_run():
    """2,048 responses x 750 tokens / (16 NPUs x 110 tokens/s) = 873 s; 1,961 iterations are 19.8 days."""
    resolved = resolved_of("qwen25_7b_910c")
    assert iteration_seconds(resolved, Rates()) == pytest.approx(2048 * 750 / 1760)
    assert run_days(resolved, 1961, Rates()) == pytest.approx(19.8, abs=0.05)


TP = "mindspeed_rl.actor_config.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("name", "overrides", "days", "found"),  # nodes, TP, PP, rollout TP
    [
        ("qwen25_7b_910c", [], 25, (1, 4, 1, 1)),  # 19.8 days on one node
        ("qwen25_7b_910c", ["hardware.nodes=8"], 25, (1, 4, 1, 1)),
        ("qwen25_7b_910c", [], 19, (2, 4, 1, 1)),
        ("qwen25_7b_910c", [], 5, (4, 4, 1, 1)),
        ("qwen25_7b_910c", [], 7, (4, 4, 1, 1)),  # 3 nodes would be enough, but do not divide 128 prompts
        ("qwen25_7b_910c", ["rollout.prompts=96"], 7, (3, 4, 1, 1)),
        ("qwen25_7b_910c", [], 2.5, (8, 4, 1, 1)),
        ("qwen25_7b_910c", [], 1.3, (16, 4, 1, 2)),  # 256 engines of TP 1 for 128 prompts: rollout TP 2
        ("qwen25_7b_910c", [], 0.1, None),
        ("qwen25_7b_910b", [f"{TP}=8"], 50, (1, 4, 1, 1)),  # eight ranks do not divide 28 heads
        ("qwen25_3b_910b", [f"{TP}=4"], 50, (1, 2, 1, 1)),  # two key/value groups
        ("qwen25_7b_910b", ["hardware.memory_gib=40"], 50, (1, 4, 2, 1)),  # 39.7 GiB at TP 4, and 4 reserved
    ],
)
def test_the_smallest_layout_for_a_budget(name, overrides, days, found):
    layout = next(layouts_for_budget(resolved_of(name, *overrides), 1961, days, Rates()), None)
    assert (layout and (layout.nodes, layout.tp, layout.pp, layout.rollout_tp)) == found


def test_the_fastest_layout():
    """A prompt per rollout engine of at most four NPUs (key/value groups): 128 x 4 = 512 NPUs."""
    layout = fastest_layout(resolved_of("qwen25_7b_910c"))
    assert (layout.nodes, layout.tp, layout.pp, layout.rollout_tp) == (32, 4, 1, 4)
    days = run_days(layout, 1961, Rates())
    assert next(layouts_for_budget(layout, 1961, 0.9 * days, Rates()), None) is None
    assert next(layouts_for_budget(layout, 1961, 1.1 * days, Rates())) == layout


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


ITERATION = '{{"step": 1, "prompt_length/mean": {}, "response_length/mean": {}, "e2e_tps": {}}}\n'


def test_the_rates_of_an_earlier_run(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text(ITERATION.format(100, 300, 80) + ITERATION.format(100, 500, 120))
    assert read_rates(file) == Rates(500, 100)
    assert main(["check", "qwen25_7b_910c", "--metrics", str(file)]) == 0
    assert "640 s an iteration" in capsys.readouterr().out  # 2,048 x 500 tokens by 16 x 100 a second
    file.write_text(file.read_text() + ITERATION.format(100, 300, '"fast"'))
    with pytest.raises(DataError, match=r"metrics.jsonl:3: .*'fast'"):
        read_rates(file)
    file.write_text("")
    with pytest.raises(DataError, match="holds no iteration"):
        read_rates(file)
