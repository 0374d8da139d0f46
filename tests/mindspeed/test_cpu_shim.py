"""The CPU shim without MindSpeed-RL: weight layouts, stubs, device names."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coca_mindspeed.errors import ConfigError, MissingDependencyError
from tests.support.mindspeed_host import operators, stubs
from tests.support.mindspeed_host.rollout import responses_at_once
from tests.support.mindspeed_host.weights import Layout, Shard, local_shard

NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    *(
        f"decoder.layers.{layer}.{name}"
        for layer in range(2)
        for name in (
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_qkv.bias",
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    ),
]


def _hf_state(query_heads: int, groups: int, head: int, hidden: int, ffn: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = {
        "model.embed_tokens.weight": draw(12, hidden),
        "model.norm.weight": draw(hidden),
        "lm_head.weight": draw(12, hidden),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, heads in (("q", query_heads), ("k", groups), ("v", groups)):
            state[f"{prefix}self_attn.{name}_proj.weight"] = draw(heads * head, hidden)
            state[f"{prefix}self_attn.{name}_proj.bias"] = draw(heads * head)
        state |= {
            f"{prefix}input_layernorm.weight": draw(hidden),
            f"{prefix}post_attention_layernorm.weight": draw(hidden),
            f"{prefix}self_attn.o_proj.weight": draw(hidden, query_heads * head),
            f"{prefix}mlp.gate_proj.weight": draw(ffn, hidden),
            f"{prefix}mlp.up_proj.weight": draw(ffn, hidden),
            f"{prefix}mlp.down_proj.weight": draw(hidden, ffn),
        }
    return state


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_cut_and_join_are_inverse(tensor_parallel: int, heads: int, groups: int) -> None:
    layout = Layout(groups, heads, 4, tensor_parallel, tied_embeddings=False)
    state = _hf_state(heads, groups, 4, 16, 8)
    shards = [Shard(r, {name: layout.cut(name, state, r) for name in NAMES}) for r in range(tensor_parallel)]
    # Pipeline parallelism: the layers of a rank come in shards of their own.
    halves = [
        Shard(s.tensor_rank, {k: v for k, v in s.tensors.items() if (".layers.1." in k) == second})
        for s in shards
        for second in (False, True)
    ]
    joined = layout.join(halves)
    assert joined.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(joined[name], tensor), name


def test_query_key_value_are_interleaved_by_group() -> None:
    # 2 groups of 2 query heads of size 1: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1.
    layout = Layout(query_groups=2, heads=4, head_size=1, tensor_parallel=2, tied_embeddings=False)
    prefix = "model.layers.0.self_attn."
    state = {
        f"{prefix}q_proj.bias": torch.tensor([0.0, 1, 2, 3]),
        f"{prefix}k_proj.bias": torch.tensor([10.0, 11]),
        f"{prefix}v_proj.bias": torch.tensor([20.0, 21]),
    }
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    assert layout.cut(name, state, 0).tolist() == [0, 1, 10, 20]
    assert layout.cut(name, state, 1).tolist() == [2, 3, 11, 21]


def test_tied_embeddings_and_unknown_parameters() -> None:
    layout = Layout(2, 4, 4, 1, tied_embeddings=True)
    state = _hf_state(4, 2, 4, 16, 8)
    del state["lm_head.weight"]
    assert torch.equal(layout.cut("output_layer.weight", state, 0), state["model.embed_tokens.weight"])
    joined = layout.join([Shard(0, {"embedding.word_embeddings.weight": torch.ones(2, 2)})])
    assert torch.equal(joined["lm_head.weight"], torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        layout.join([Shard(0, {"decoder.layers.0.mlp.router.weight": torch.ones(1)})])
    with pytest.raises(ConfigError, match="found 1 of 2 tensor-parallel parts"):
        Layout(2, 4, 4, 2, tied_embeddings=False).join([Shard(0, {"output_layer.weight": torch.ones(1)})])


def test_layout_of_a_configuration() -> None:
    config = SimpleNamespace(
        num_key_value_heads=2, num_attention_heads=4, hidden_size=32, tie_word_embeddings=False, head_dim=None
    )
    assert Layout.of(config, 2) == Layout(2, 4, 8, 2, False)


def test_a_shard_that_is_sent_holds_its_own_parameters_alone() -> None:
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


@pytest.mark.parametrize(
    ("vocabulary", "max_tokens", "expected"),
    [(64, 16, 512), (49_152, 24, 227), (49_152, 4096, 1), (151_936, 100_000, 1)],
)
def test_as_many_responses_are_sampled_at_once_as_their_scores_leave_room_for(
    vocabulary: int, max_tokens: int, expected: int
) -> None:
    assert responses_at_once(vocabulary, max_tokens) == expected


def test_operators_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    silu = x[:, :2] * torch.sigmoid(x[:, :2])
    torch.testing.assert_close(operators.npu_swiglu(x), silu * torch.tensor([[3.0, 4.0]]))
    normal, reciprocal = operators.npu_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(reciprocal, torch.tensor([[12.5**-0.5]]))
    torch.testing.assert_close(normal, torch.tensor([[3.0, 8.0]]) * 12.5**-0.5)
    cos, sin = torch.zeros(4), torch.ones(4)  # a quarter turn
    torch.testing.assert_close(operators.npu_rotary_mul(x, cos, sin), torch.tensor([[-3.0, -4.0, 1.0, 2.0]]))


def test_packed_attention_is_causal_attention_of_each_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 4, 3, generator=generator)
    key, value = (torch.randn(5, 2, 3, generator=generator) for _ in range(2))
    mask = torch.ones(1, dtype=torch.bool)
    (found,) = operators.npu_fusion_attention(
        query, key, value, 4, "TND", scale=0.5, atten_mask=mask, actual_seq_qlen=[2, 5], sparse_mode=4
    )
    for start, end in ((0, 2), (2, 5)):
        for head in range(4):
            for token in range(start, end):
                seen = slice(start, token + 1)
                weights = (0.5 * key[seen, head // 2] @ query[token, head]).softmax(0)
                torch.testing.assert_close(found[token, head], weights @ value[seen, head // 2])
        rows = [t[start:end].flatten(1)[:, None] for t in (query, key, value)]
        (alone,) = operators.npu_fusion_attention(*rows, 4, "SBH", scale=0.5, atten_mask=mask)
        torch.testing.assert_close(alone[:, 0], found[start:end].flatten(1))


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stubs.install()
    stubs.install()
    import torchair  # type: ignore[import-not-found]

    yield torchair
    for name in [name for name in sys.modules if name.partition(".")[0] in stubs.PACKAGES]:
        del sys.modules[name]


def test_stubs_can_be_imported_subclassed_and_named_but_not_called(stood_in: Any) -> None:
    import torchair.deep.inside as module  # type: ignore[import-not-found]
    from torchair.deep import Thing  # type: ignore[import-not-found]

    class Ours(Thing):
        def answer(self) -> int:
            return 42

    assert Ours().answer() == 42
    assert module.CONSTANT is module.CONSTANT
    with pytest.raises(MissingDependencyError, match=r"torchair\.deep\.Thing"):
        Thing()
    with pytest.raises(MissingDependencyError, match=r"torchair\.deep\.inside\.f\.g was called"):
        module.f.g(1)
    decorated = stood_in.register_fx_node_ge_converter("op")(len)
    assert decorated is len


def test_device_names_mean_the_cpu() -> None:
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
