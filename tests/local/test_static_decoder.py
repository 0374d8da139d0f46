"""The static decoder against plain passes, on the CPU, where its steps are the same but no graphs."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import LoraConfig, ModelConfig
from coca_mindspeed.local import static_decoder
from coca_mindspeed.local.inverse_cdf import NoDistributionError, numbers_per_draw, tokens_at
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import weight_shapes
from coca_mindspeed.local.plan import estimate_memory
from coca_mindspeed.local.policy import Policy, add_adapters
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.static_decoder import STATIC, CaptureError, StaticDecoder, decodes_statically
from tests.local.models_for_tests import random_policy, write_random_model
from tests.local.test_architectures import config_of

CPU = torch.device("cpu")
MIXED = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
PROMPTS = {"mixed": MIXED, "prefix": [[*range(3, 30), 31], [*range(3, 30), 40, 41, 42]], "one": [[4, 5]]}


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


def assert_drawn(samples, policy, new, seed=0, temperature=1.0, tolerance=2e-5):
    """Each response alone, without cache or padding: its tokens are those at the numbers, to the end or the limit."""
    generator = torch.Generator().manual_seed(seed)
    numbers = numbers_per_draw(policy.vocabulary)
    blocks = [min(16, new - start) for start in range(0, new, 16)]
    uniform = torch.cat([torch.rand(block, len(samples.lengths), numbers, generator=generator) for block in blocks])
    for row, (ids, length) in enumerate(zip(samples.token_ids, samples.lengths.tolist(), strict=True)):
        prompt, response = samples.prompts[row], ids[:length].tolist()
        with torch.inference_mode(), policy.autocast():
            logits = policy.model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = policy.sampling_logits(logits, temperature).log_softmax(-1)
        assert tokens_at(expected.exp(), uniform[:length, row])[0][:, 0].tolist() == response
        ended = [token in policy.eos_ids for token in response]
        assert not any(ended[:-1])
        assert ended[-1] == bool(samples.finished[row])
        assert ended[-1] or length == new
        log_probs = expected.gather(1, ids[:length, None])[:, 0]
        torch.testing.assert_close(samples.log_probs[row, :length], log_probs, atol=tolerance, rtol=tolerance)
        entropy = torch.special.entr(expected.exp()).sum(-1).mean()
        torch.testing.assert_close(samples.entropy[row], entropy, atol=tolerance, rtol=1e-3)
        assert bool((samples.token_ids[row, length:] == policy.pad_id).all())
        assert bool((samples.log_probs[row, length:] == 0).all())


def check(policy, prompts=MIXED, seed=0, temperature=1.0, tolerance=2e-5, **changes):
    samples = sample(policy, prompts, seed, temperature=temperature, **changes)
    assert_drawn(samples, policy, changes.get("max_new_tokens", 24), seed, temperature, tolerance)
    return samples


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize(("architecture", "temperature"), [("qwen2", 1.0), ("llama", 0.7)])
def test_the_same_numbers_draw_the_tokens_of_plain_passes(tmp_path, architecture, temperature, prompts):
    policy = loaded(tmp_path / "model", architecture)
    samples = check(policy, prompts, temperature=temperature)
    assert len(prompts) == 1 or len(set(samples.lengths.tolist())) > 2, "responses should end at different times"
    buffers = policy.static
    check(policy, prompts[:1], 1, temperature=temperature, group_size=3, max_new_tokens=20)
    assert policy.static is buffers, "a smaller rollout uses the buffers again"
    check(policy, prompts, 2, temperature=temperature, max_new_tokens=33)


@pytest.mark.parametrize("architecture", STATIC)
def test_every_architecture_decodes_as_in_plain_passes(architecture):
    torch.manual_seed(0)
    own = {"gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 512}}.get(architecture, {"sliding_window": None})
    model = AutoModelForCausalLM.from_config(config_of(architecture, own), attn_implementation="sdpa").eval()
    policy = Policy(model, None, None, (1,), 0, decoding="static")
    check(policy, group_size=2, max_new_tokens=8, tolerance=1e-4)


def test_large_vocabularies_are_drawn_in_two_stages():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama", {"vocab_size": 5000})).eval()
    check(Policy(model, None, None, (1,), 0, decoding="static"), group_size=2, max_new_tokens=8)


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
    before, buffers = check(policy), policy.static
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    after = check(policy)
    assert policy.static is buffers
    assert not torch.equal(before.token_ids, after.token_ids)
    head = policy.model.get_output_embeddings()
    head.weight.data = head.weight.data.clone()
    check(policy)
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
        samples = sample(policy, max_new_tokens=10)
        for row, length in enumerate(samples.lengths.tolist()):
            prompt, ids = MIXED[row // 4], samples.token_ids[row, :length]
            with torch.inference_mode(), policy.autocast():
                text = torch.tensor([[*prompt, *ids.tolist()]])
                logits = policy.model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = policy.sampling_logits(logits, 1.0).log_softmax(-1).gather(1, ids[:, None])[:, 0]
            torch.testing.assert_close(samples.log_probs[row, :length], expected, atol=0.05, rtol=0.02)
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
