"""The plan of a cluster run: memory, time and iterations by hand. Its refusals: ``starts.tsv``."""

import json
import math

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.checks import steps_of_epochs
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.plan import (
    PUBLISHED_RATES,
    Rates,
    checkpoint_bytes,
    host_gib,
    iteration_seconds,
    longest_responses,
    make_plan,
    model_parameters,
    npu_memory,
    read_rates,
)
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, stage_marker
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.json_files import read_object, write_json
from coca_mindspeed.utils.process import GIB


def changed(resolved, **changes):
    return resolved.model_copy(update=changes)


_SEVEN = ClusterRun(compose_run("qwen25_7b_910b").run).resolved


def test_sizes_are_those_of_mindspeed_rls_values():
    start = ClusterRun(compose_run("qwen25_7b_910b").run)
    start.values["rl_config"] |= {"n_samples_per_prompt": 4, "max_prompt_length": 100}
    start.values["actor_config"] |= {"lr": 1e-5, "micro-batch-size": 3}
    del start.values["actor_config"]["micro_batch_size"]
    resolved = start.resolved
    assert (resolved.group, resolved.max_prompt, resolved.lr, resolved.micro_batch) == (4, 100, 1e-5, 3)


#: Parameters as the published checkpoints count them; 7B of TACO is Qwen2.5-7B.
PARAMETERS = {
    "qwen25_1p5b": 1_543_714_304,
    "qwen25_3b": 3_085_938_688,
    "qwen25_7b": 7_615_616_512,
    "qwen25_7b_taco": 7_615_616_512,
    "llama3_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", [f"{model}_{machine}" for model in PARAMETERS for machine in ("910b", "910c")])
def test_ready_made_runs_have_the_papers_settings_and_hold(name):
    run = compose_run(name).run
    plan = make_plan(run)
    assert plan.problems == ()
    resolved, layout = plan.resolved, plan.resolved.layout
    assert model_parameters(resolved) == PARAMETERS[name.rpartition("_")[0]]
    assert (resolved.prompts, resolved.group, resolved.max_new, resolved.mini_batch) == (128, 16, 4096, 128)
    assert (resolved.top_k, resolved.top_p, resolved.min_p, run.rollout.temperature) == (-1, 1.0, 0.0, 1.0)
    assert resolved.lr == run.optimizer.lr == 1e-6
    assert resolved.kl_coefficient == 0
    assert resolved.npus == (8 if name.endswith("910b") else 16)
    assert resolved.npus == layout.ranks * resolved.tp * resolved.pp == layout.engines * resolved.rollout_tp
    assert longest_responses(resolved, plan.memory) > 1
    assert (resolved.rollout_tp, resolved.memory_utilization) == (1, 0.8)
    # All prompts are answered in one wave.
    assert resolved.max_sequences >= resolved.engine_responses == 128 * 16 // resolved.npus
    assert changed(resolved, rollout_dispatch=64).engine_responses == 64


def test_memory_by_hand():
    """Two layers of hidden 8, 2 heads, 1 group, MLP 16, vocabulary 32, all by the formulas that ``check`` prints."""
    resolved = changed(
        _SEVEN,
        **{"layers": 2, "hidden": 8, "heads": 2, "query_groups": 1, "ffn": 16, "vocab": 32},
        **{"untied_embeddings": True, "qkv_bias": False, "tp": 1, "pp": 1, "cp": 1, "npus": 4, "rollout_tp": 1},
        **{"max_prompt": 40, "max_new": 60, "memory_utilization": 0.5, "max_sequences": 10},
        **dict.fromkeys(("max_model_len", "update_tokens", "max_batched_tokens"), 100),
        **{"memory_gib": 1 / 1024, "reserved_gib": 1 / 2**14},
    )
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
    parameters = 2 * layer + 2 * 32 * 8
    memory = npu_memory(resolved)
    training, rollout = ({part.name: part.bytes for part in phase.parts} for phase in memory)
    assert training["weights"] == 2 * parameters
    assert training["gradients"] == 4 * parameters
    assert training["optimizer"] == 12 * parameters / 4
    tokens = 103  # of 100, for microbatches are evened out without regard to the limit
    assert training["activations"] == tokens * 2 * (2 * (6 * 8 + 2 * 4 + 3 * 16))
    assert training["logits"] == tokens * 32 * 12
    weights, work = 2 * (parameters + 8), 100 * 2 * (4 * 8 + 3 * 16) + 10 * 32 * 8
    assert rollout["outside of torch"] == GIB / 2**14
    assert rollout["KV cache"] == 0.5 * GIB / 1024 - weights - work - GIB / 2**14
    kv_bytes_per_token = 2 * 2 * 2 * 4  # keys and values, bf16, two layers, one head of 4
    assert longest_responses(resolved, memory) == rollout["KV cache"] / (kv_bytes_per_token * 100)
    assert rollout["training state not offloaded"] == 0
    _, kept = npu_memory(changed(resolved, offload_optimizer=False))
    assert kept.bytes_of("training state not offloaded") == training["optimizer"]


def test_what_layouts_do_to_memory():
    def training(**changes):
        return {part.name: part.bytes for part in npu_memory(changed(_SEVEN, **changes))[0].parts}

    whole, halves = training(tp=2), training(tp=4)
    assert whole["weights"] == 2 * halves["weights"]
    assert whole["optimizer"] == halves["optimizer"]  # half the parameters of a rank, half the ranks to share them
    assert training(distributed_optimizer=False)["optimizer"] == 2 * halves["optimizer"]
    assert training(recompute="full")["activations"] < halves["activations"] / 10
    one = halves["activations"] / _SEVEN.layers
    block = training(recompute="full", recompute_method="block", recompute_layers=1)["activations"]
    assert 27 * one < block < 27.2 * one  # one layer of 28 keeps its input alone
    groups = training(recompute="full", recompute_method="uniform", recompute_layers=14)["activations"]
    assert 14 * one < groups < 14.4 * one
    assert training(sequence_parallel=False)["activations"] > halves["activations"]
    assert training(kl_coefficient=0.1)["reference model"] == halves["weights"]
    both_ends = model_parameters(changed(_SEVEN, pp=2)) - model_parameters(changed(_SEVEN, untied_embeddings=False))
    assert both_ends == _SEVEN.vocab * _SEVEN.hidden
    assert checkpoint_bytes(_SEVEN) == 14 * 7_615_616_512


def test_a_pass_for_log_probs_has_a_phase_of_its_own():
    """65,536 tokens at TP 4: log-probs of the actor with several updates, or of the reference."""
    assert [phase.name for phase in npu_memory(changed(_SEVEN, logprob_tokens=65_536))] == ["training", "rollout"]
    for changes in (
        {"logprob_tokens": 65_536, "mini_batch": 64},
        {"reference_tokens": 65_536, "kl_coefficient": 0.1},
    ):
        _, phase, _ = npu_memory(changed(_SEVEN, **changes))
        tokens = math.ceil(65_536 * 1.025)
        assert phase.bytes_of("logits") == tokens * _SEVEN.vocab / 4 * 8
        assert phase.bytes_of("gradients") == 0  # offloaded
    plan = make_plan(
        compose_run(
            "qwen25_7b_910b", ["trainer.minibatches=4", "mindspeed_rl.rl_config.actor_max_packing_token_size=262144"]
        ).run
    )
    assert [problem.code for problem in plan.problems] == ["memory-log-probs"]


def test_values_that_hardly_any_run_means_are_warned_about():
    changes = ["optimizer.lr=1e-3", "method.clip=0.01", "data.epochs=null", "trainer.steps=200"]
    changes += ["mindspeed_rl.coca.rollout_is_threshold=0.01", "rollout.max_new_tokens=64"]
    plan = make_plan(compose_run("qwen25_7b_910b", [*changes, "checkpoint.interval=1000"]).run)
    assert [(problem.code, problem.key) for problem in plan.warnings] == [
        ("unusual-value", "optimizer.lr"),
        ("unusual-value", "method.clip"),
        ("unusual-value", "mindspeed_rl.coca.rollout_is_threshold"),
        ("unusual-value", "rollout.max_new_tokens"),
        ("no-checkpoint", "checkpoint.interval"),
    ]
    assert dict(plan.rows)["grader"] == "math"


def test_validations_count(tmp_path):
    """8 iterations, one validation before, one in the middle and one behind them, of 5 questions and 16 responses."""
    record = {"id": "0", "dataset": "d", "question": "q", "category": "math", "answer": "1"}
    rows = "".join(json.dumps({**record, "id": str(number), "question": f"q{number}"}) + "\n" for number in range(5))
    (tmp_path / "held.jsonl").write_text(rows)
    changes = [f"data.evaluate={tmp_path}/held.jsonl", "data.epochs=null", "trainer.steps=8", "evaluation.interval=4"]
    start = make_plan(compose_run("qwen25_7b_910b", changes).run).start
    assert (start.validations, start.held_out, start.validation_responses) == (3, 5, 3 * 5 * 16)
    none = make_plan(compose_run("qwen25_7b_910b", [*changes, "evaluation.interval=0"]).run).start
    assert none.validation_responses == 0


def test_time_and_host_memory_by_hand():
    """2,048 responses x 750 tokens / (16 NPUs x 110 tokens/s) = 873 s."""
    larger = changed(_SEVEN, npus=16)
    assert iteration_seconds(larger, PUBLISHED_RATES) == pytest.approx(2048 * 750 / 1760)
    parameters = 7_615_616_512
    expected = 12 * parameters + 8 * 2 * parameters + 8 * 2 * parameters / 4
    assert host_gib(_SEVEN) == pytest.approx(expected / 2**30)
    assert host_gib(changed(_SEVEN, offload_optimizer=False)) == pytest.approx((expected - 12 * parameters) / 2**30)
    assert host_gib(changed(_SEVEN, nodes=2, npus=16)) == pytest.approx((expected - 6 * parameters) / 2**30)


ITERATION = '{{"step": 1, "prompt_length/mean": {}, "response_length/mean": {}, "e2e_tps": {}}}\n'


def test_the_rates_of_an_earlier_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")  # a row in one line
    file = tmp_path / "metrics.jsonl"
    file.write_text(ITERATION.format(100, 300, 80) + ITERATION.format(100, 500, 120))
    assert read_rates(file) == Rates(500, 100)
    check = ["check", "qwen25_7b_910c", "data.rows=251122", "--metrics", str(file)]
    assert main(check) == 0
    shown = capsys.readouterr().out
    assert "time │ unknown" in " ".join(shown.split())  # whose metrics they are is not known
    other = ClusterRun(compose_run("qwen25_7b_910c", ["hardware.nodes=2"]).run)
    measured = mindspeed_values(other, 2, StageFiles(tmp_path))
    stage_marker(measured).write(tmp_path, resumed=False)
    assert main(check) == 0
    assert "640 s an iteration" in capsys.readouterr().out  # 2,048 x 500 tokens by 16 x 100 a second
    marker = read_object(tmp_path / MARKER)
    marker["settings"]["coca"]["npu_memory_gib"] = None  # of a run of 0.2
    write_json(tmp_path / MARKER, marker)
    assert main(check) == 0
    assert "coca.npu_memory_gib" in capsys.readouterr().out
    file.write_text(file.read_text() + ITERATION.format(100, 300, '"fast"'))
    with pytest.raises(DataError, match=r"metrics.jsonl:3: .*'fast'"):
        read_rates(file)
    file.write_text("")
    with pytest.raises(DataError, match="holds no iteration"):
        read_rates(file)


def test_iterations_from_the_data(tmp_path):
    assert [steps_of_epochs(epochs, 251_122, 128) for epochs in (0.5, 1.0)] == [980, 1961]
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "q", "answer": "a"}\n\n' * 1000)
    plan = make_plan(compose_run("qwen25_7b_910b", [f"data.train={file}", "data.epochs=2"]).run)
    assert (plan.iterations, dict(plan.rows)["iterations"]) == (15, f"15 a stage (1,000 questions by {file})")
    unknown = make_plan(compose_run("qwen25_7b_910b", ["data.rows=null"]).run)
    assert (unknown.iterations, unknown.problems) == (None, ())
    with pytest.raises(ConfigError) as caught:
        steps_of_epochs(1.0, 10, 128)
    assert "12.8" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("tokens", "sequences", "tensor", "warnings"),
    [(1024, 2, 4, ["short-thoughts"]), (8192, 2, 4, []), (16384, 1, 4, []), (32768, 1, 8, [])],
)
def test_the_lengths_of_thoughts_have_packing_sizes_that_fit(tokens, sequences, tensor, warnings):
    """Packing and vLLM's lengths follow; from 16,384 tokens on, a microbatch of the update holds one sequence."""
    longest, rl = 2048 + tokens, "mindspeed_rl.rl_config.update_max_packing_token_size"
    settings = ["method.thinking=true", "model.chat_template_kwargs={}", f"rollout.max_new_tokens={tokens}"]
    settings += [f"mindspeed_rl.actor_config.tensor_model_parallel_size={tensor}"]
    settings += [f"{rl}={longest}"] * (sequences == 1)
    plan = make_plan(compose_run("qwen3_8b_910b", settings).run)
    resolved = plan.resolved
    assert (resolved.update_tokens, resolved.logprob_tokens) == (sequences * longest, 2 * longest)
    assert (resolved.max_model_len, resolved.max_batched_tokens) == (longest, max(8192, longest))
    assert [warning.code for warning in plan.warnings] == warnings
    assert plan.problems == ()
