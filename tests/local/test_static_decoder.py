"""The static decoder's buffers and weights, on the CPU, where its steps are the same but no graphs."""

from types import SimpleNamespace

import pytest
import torch

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import LoraConfig, ModelConfig
from coca_mindspeed.local import static_decoder
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import weight_shapes
from coca_mindspeed.local.plan import estimate_memory
from coca_mindspeed.local.policy import add_adapters
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.static_decoder import CaptureError, StaticDecoder, decodes_statically
from tests.local.models_for_tests import random_policy, write_random_model
from tests.local.plain_passes import assert_plain, sample_as_plain

CPU = torch.device("cpu")
MIXED = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """So that a rollout crosses them."""
    monkeypatch.setattr(static_decoder, "ROW_BUCKET", 5)
    monkeypatch.setattr(static_decoder, "COLUMN_BUCKET", 7)


def loaded(path, architecture="qwen2", **config):
    policy = load_policy(write_random_model(path, architecture), ModelConfig(compute_dtype="float32", **config), CPU)
    policy.decoding = "static"
    return policy


def sample(policy, prompts=MIXED, seed=0, **changes):
    arguments = {"group_size": 4, "max_new_tokens": 24, "temperature": 1.0, **changes}
    return sample_responses(policy, prompts, generator=torch.Generator().manual_seed(seed), **arguments)


def test_a_smaller_rollout_uses_the_buffers_again(tmp_path):
    policy = loaded(tmp_path / "model", "llama")
    sample_as_plain(policy, MIXED)
    buffers = policy.static
    sample_as_plain(policy, MIXED[:1], seed=1, group_size=3, new=20)
    assert policy.static is buffers
    sample_as_plain(policy, MIXED, seed=2, new=33)
    assert policy.static is not buffers


def test_batches_and_rows_of_their_own(tmp_path):
    """Batches take numbers one after the other, and keep their responses when the buffers are used again."""
    policy = loaded(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    settings = {"group_size": 4, "max_new_tokens": 12, "temperature": 1.0, "generator": generator}
    parts = [sample_responses(policy, [prompt], **settings) for prompt in MIXED]
    whole = sample(policy, max_new_tokens=12, batch_responses=4)
    assert whole.lengths.tolist() == [length for part in parts for length in part.lengths.tolist()]
    for n, part in enumerate(parts):
        assert torch.equal(whole.token_ids[4 * n : 4 * n + 4, : part.token_ids.shape[1]], part.token_ids)


def test_weights_changed_in_place_are_used_and_moved_ones_make_new_buffers(tmp_path):
    policy = loaded(tmp_path / "model")
    before, buffers = sample_as_plain(policy, MIXED), policy.static
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    after = sample_as_plain(policy, MIXED)
    assert policy.static is buffers
    assert not torch.equal(before.token_ids, after.token_ids)
    head = policy.model.get_output_embeddings()
    head.weight.data = head.weight.data.clone()
    sample_as_plain(policy, MIXED)
    assert policy.static is not buffers


@pytest.mark.parametrize("lora", [None, 4])
def test_bfloat16_rounds_as_the_autocast_of_plain_passes(lora):
    policy = random_policy("llama", recompute=False, dtype=torch.bfloat16)
    assert not decodes_statically(policy)  # by default, on a CPU
    policy.decoding = "static"
    add_adapters(policy, LoraConfig(rank=lora, base_dtype="float32"), seed=0)
    for change in (0.0, 0.1):
        with torch.no_grad():
            for parameter in policy.trained_parameters():
                parameter.add_(change * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        assert_plain(sample(policy, max_new_tokens=10), policy, new=10, tolerance=0.05)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert all(isinstance(p, torch.nn.Parameter) for p in policy.trained_parameters())
    assert policy.trained_parameters()


def test_broken_weights_are_refused(tmp_path):
    policy = loaded(tmp_path / "model")
    sample(policy)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(NoDistributionError):
        sample(policy)


def test_without_a_graph_rows_are_shared_as_if_nothing_had_happened(tmp_path, monkeypatch, capsys):
    policy = loaded(tmp_path / "model")

    def fails(*arguments):
        raise CaptureError("operation not permitted")

    monkeypatch.setattr(StaticDecoder, "run", fails)
    found = [sample(policy, seed=seed) for seed in (0, 1)]
    assert capsys.readouterr().err.count("operation not permitted") == 1
    assert policy.decoding == "shared"
    assert policy.static is None
    assert torch.equal(found[0].token_ids, sample(policy).token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_the_buffers_is_estimated(tmp_path, dtype, monkeypatch):
    path, gpu = write_random_model(tmp_path / "model", "qwen2"), SimpleNamespace(total_memory=2**40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    rollout = ("rollout.prompts=2", "rollout.group_size=4", "rollout.max_prompt_tokens=20", "rollout.max_new_tokens=30")
    overrides = (f"model.path={path}", "data.train=t", f"model.compute_dtype={dtype}", *rollout)
    run = compose_run("local", [*overrides, "evaluation.interval=0"]).run
    policy = load_policy(path, run.model, CPU)
    policy.decoding = "static"
    sample(policy, [[5] * 20, [6] * 20], max_new_tokens=30)
    need = estimate_memory(run, policy.model.config, weight_shapes(path), torch.device("cuda"))
    assert policy.static.decoder.nbytes == pytest.approx(need.decoder, rel=1e-2)
