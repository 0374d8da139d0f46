"""Time and host memory of a run: hand-computed."""

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import DataError
from coca_mindspeed.mindspeed.plan import Rates, host_gib, iteration_seconds, make_plan, read_rates, run_days
from coca_mindspeed.mindspeed.resolved_config import resolve_config
from tests.integration.mindspeed import tiny


def resolved_of(name, *overrides):
    return resolve_config(compose_run(name, overrides).run)


def test_time_of_the_papers_run():
    """2,048 responses x 750 tokens / (16 NPUs x 110 tokens/s) = 873 s; 1,961 iterations are 19.8 days."""
    resolved = resolved_of("qwen25_7b_910c")
    assert iteration_seconds(resolved, Rates()) == pytest.approx(2048 * 750 / 1760)
    assert run_days(resolved, 1961, Rates()) == pytest.approx(19.8, abs=0.05)


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


@pytest.mark.parametrize(
    ("name", "layout", "npus"), [("qwen25_1p5b_910b", [], 1), ("qwen25_7b_910b", ["parallel=tp2pp2"], 4)]
)
def test_the_tiny_models_overrides_fit_the_runs_for_ascend(name, layout, npus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny, "warm_up", lambda *_arguments: None)
    tiny.main(tmp_path)
    overrides = capsys.readouterr().out.split()
    one_node = ["hardware.nodes=1", f"hardware.npus_per_node={npus}", "trainer.steps=2"]
    plan = make_plan(compose_run(name, [*overrides, *layout, *one_node]).run)
    assert (plan.problems, plan.iterations) == ((), 2)
