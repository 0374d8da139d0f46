"""The CPU shim without MindSpeed-RL: weight layouts, stubs, device names."""

import inspect
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.mindspeed.plan import make_plan
from tests.integration.mindspeed import tiny
from tests.support import torch_npu_signatures
from tests.support.mindspeed_host import operators, stubs
from tests.support.mindspeed_host.weights import local_shard


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


def test_a_shard_that_is_sent_holds_its_own_parameters_alone():
    """Megatron's parameters are views into one buffer, and a view would be sent with all of the buffer behind it."""
    hidden, layers = 64, 6
    buffer = torch.randn(layers, hidden, hidden)
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(layers))
    for number, (layer, weight) in enumerate(zip(decoder.layers, buffer, strict=True), start=1):
        layer.layer_number, layer.mlp = number, torch.nn.Module()
        layer.mlp.weight = torch.nn.Parameter(weight)
    model = torch.nn.Module()
    model.decoder = decoder

    shard = local_shard([SimpleNamespace(module=model)], tensor_rank=0)
    assert {name: weight.tolist() for name, weight in shard.tensors.items()} == {
        f"decoder.layers.{number}.mlp.weight": weight.tolist() for number, weight in enumerate(buffer)
    }
    assert len(pickle.dumps(shard)) < 1.2 * buffer.nbytes + 10_000


def _shape(signature):
    return [(p.name, p.kind, p.default is p.empty) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_operators_have_the_parameters_of_torch_npu(name):
    (real,) = torch_npu_signatures.signatures()[name.removeprefix("torch_npu.")]
    assert _shape(inspect.signature(operators.OPERATORS[name])) == _shape(real)


@pytest.mark.parametrize("refused", [{"keep_prob": 0.9}, {"pse": torch.ones(1)}, {"prefix": [1]}])
def test_attention_that_is_not_written_out_is_refused(refused):
    with pytest.raises(ValueError, match="npu_fusion_attention"):
        operators.npu_fusion_attention(*[torch.ones(1, 1, 2, 2)] * 3, 1, "BNSD", **refused)


@pytest.fixture
def stood_in(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stubs.install()
    stubs.install()
    import torchair  # type: ignore[import-not-found]

    yield torchair
    for name in [name for name in sys.modules if name.partition(".")[0] in stubs.PACKAGES]:
        del sys.modules[name]


def test_stubs_can_be_imported_subclassed_and_named_but_not_called(stood_in):
    import torchair.deep.inside as module  # type: ignore[import-not-found]
    from torchair.deep import Thing  # type: ignore[import-not-found]

    class Ours(Thing):
        def answer(self):
            return 42

    assert Ours().answer() == 42
    assert module.CONSTANT is module.CONSTANT
    with pytest.raises(MissingDependencyError, match=r"torchair\.deep\.Thing"):
        Thing()
    with pytest.raises(MissingDependencyError, match=r"torchair\.deep\.inside\.f\.g was called"):
        module.f.g(1)
    decorated = stood_in.register_fx_node_ge_converter("op")(len)
    assert decorated is len


def test_device_names_mean_the_cpu():
    script = """
import torch
from tests.support import mindspeed_host
mindspeed_host.install(); mindspeed_host.install()
import torch_npu
zero = torch.zeros(2)
made = [torch.zeros(2, device=name) for name in ("cuda", "npu:0", torch.cuda.current_device())]
moved = [zero.cuda(), zero.npu(), zero.to("cuda:0"), torch.nn.Linear(1, 1).cuda().weight]
assert {t.device.type for t in made + moved} == {"cpu"}
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
assert torch_npu.npu.mstx.range_start("x") == 0
torch.npu.set_device(3)
state = torch.cuda.get_rng_state(); a = torch.rand(3); torch.cuda.set_rng_state(state)
assert torch.equal(a, torch.rand(3))
print("fine")
"""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which the names then mean")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
