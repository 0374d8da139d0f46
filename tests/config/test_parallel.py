"""Shipped layouts and the memory of an NPU: every model with every configs/parallel/, on both machines."""

import pytest

from coca_mindspeed.config.compose import compose_run, config_directory, ready_made_runs
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.plan import make_plan

LAYOUTS = {"tp4": (4, 1), "tp2pp2": (2, 2), "tp1pp4": (1, 4)}
RUNS = [name for name in ready_made_runs() if "_910b" in name]  # the tighter machine
UPDATE = "mindspeed_rl.rl_config.update_max_packing_token_size"
SHARE = "mindspeed_rl.generate_config.gpu_memory_utilization"
TP = "mindspeed_rl.actor_config.tensor_model_parallel_size"


def test_shipped_layouts_are_listed_here():
    assert {path.stem for path in (config_directory() / "parallel").glob("*.yaml")} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RUNS)
def test_every_model_takes_every_layout_that_divides_it(name, layout):
    run = compose_run(name, [f"parallel={layout}"]).run
    tp, pp = LAYOUTS[layout]
    resolved = ClusterRun(run).resolved
    assert (resolved.tp, resolved.pp) == (tp, pp)
    assert run.model.megatron_path.endswith(f"-mcore-tp{tp}-pp{pp}")
    refused = {problem.key for problem in make_plan(run).problems}
    assert refused == ({TP} if run.model.architecture.kv_groups % tp else set())


@pytest.mark.parametrize("guide", ["ascend.md", "ascend.zh.md"])
def test_the_guides_yaml_chooses_a_layout(guide, tmp_path):
    text = (config_directory().parent / "docs" / guide).read_text(encoding="utf-8")
    file = tmp_path / "my.yaml"
    file.write_text(text.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    resolved = ClusterRun(compose_run(str(file)).run).resolved
    assert (resolved.tp, resolved.pp) == (2, 2)


@pytest.mark.parametrize(
    ("machine", "override", "key"),
    [
        ("910b", f"{UPDATE}=24576", UPDATE),
        ("910c", f"{UPDATE}=28000", UPDATE),
        ("910b", f"{SHARE}=0.936", SHARE),
    ],
)
def test_settings_that_fit_64_gib_only_are_refused(machine, override, key):
    run = f"qwen25_7b_{machine}"
    plan = make_plan(compose_run(run, [override]).run)
    assert [problem.key for problem in plan.problems] == [key]
    assert make_plan(compose_run(run, [override, "hardware.memory_gib=64"]).run).problems == ()
