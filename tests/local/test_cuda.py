"""The same results on a CUDA device as on the CPU."""

import pytest
import torch
from scipy.stats import chi2_contingency

from coca_mindspeed.config.schema import LoraConfig, ModelConfig
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import add_adapters
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.static_decoder import StaticDecoder
from tests.local.models_for_tests import random_policy, response_log_probs, sample_tokens, write_random_model
from tests.local.runs_for_tests import rows, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_sampler_and_update_on_the_device(tmp_path, architecture):
    path = write_random_model(tmp_path / "model", architecture)
    on_cpu, on_device = (load_policy(path, ModelConfig(), torch.device(d)) for d in ("cpu", "cuda"))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
    samples = sample_responses(
        on_device,
        prompts,
        group_size=8,
        max_new_tokens=40,
        temperature=0.9,
        generator=torch.Generator("cuda").manual_seed(0),
    )
    inside = torch.arange(samples.token_ids.shape[1]) < samples.lengths[:, None]
    for share in (True, False):
        expected = response_log_probs(on_cpu, prompts, samples.token_ids, temperature=0.9, share_prompts=share).detach()
        torch.testing.assert_close(samples.log_probs[inside], expected[inside], rtol=1e-3, atol=1e-3)
        again = response_log_probs(on_device, prompts, samples.token_ids.cuda(), temperature=0.9, share_prompts=share)
        torch.testing.assert_close(again.detach().cpu()[inside], expected[inside], rtol=1e-3, atol=1e-3)


@pytest.fixture
def graph_steps(monkeypatch):
    """Counts the steps that Python runs; a replayed graph runs none."""
    ran, forward = [], StaticDecoder.forward

    def counted(self, rows, width):
        ran.append(width)
        return forward(self, rows, width)

    monkeypatch.setattr(StaticDecoder, "forward", counted)
    return ran


PROMPTS = [[5, 6, 7, *range(20, 50)], [8, 9, 10, 11, 12, 13], [14]]


def sampled(policy, seed=0, **changes):
    generator = torch.Generator(policy.device).manual_seed(seed)
    settings = {"group_size": 16, "max_new_tokens": 130, "temperature": 0.9, **changes}
    return sample_responses(policy, PROMPTS, generator=generator, **settings)


def assert_log_probs(samples, policy, temperature=0.9, tolerance=1e-3):
    """Each response alone, in a plain pass."""
    for row, length in enumerate(samples.lengths.tolist()):
        prompt, ids = samples.prompts[row], samples.token_ids[row, :length].to(policy.device)
        with torch.inference_mode(), policy.autocast():
            text = torch.tensor([[*prompt, *ids.tolist()]], device=policy.device)
            logits = policy.model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = policy.sampling_logits(logits, temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu()
        torch.testing.assert_close(samples.log_probs[row, :length], expected, atol=tolerance, rtol=tolerance)
        assert (ids[-1] in policy.eos_ids) == bool(samples.finished[row])


@pytest.mark.parametrize("lora", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_graphs_decode_as_plain_passes_do_and_follow_the_weights(architecture, dtype, tolerance, lora, graph_steps):
    """Two buckets of columns are captured once; the weights change in place, and the same graphs use them."""
    pytest.importorskip("peft") if lora else None
    policy = random_policy(architecture, recompute=False, dtype=dtype)
    policy.model.to("cuda")
    use_fast_attention(policy.model, torch.device("cuda"))
    add_adapters(policy, LoraConfig(rank=lora, base_dtype="float32"), seed=0)
    before = sampled(policy)
    assert policy.decoding == "auto", "the capture failed"
    assert sorted(set(graph_steps)) == [128, 256]
    assert len(graph_steps) == 4, "a bucket runs once, and is captured once"
    assert_log_probs(before, policy, tolerance=tolerance)
    assert torch.equal(before.token_ids, sampled(policy).token_ids), "the seed decides"
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device="cuda"))
    after = sampled(policy)
    assert len(graph_steps) == 4
    assert not torch.equal(before.token_ids[:, :10], after.token_ids[:, :10])
    assert_log_probs(after, policy, tolerance=tolerance)
    assert_log_probs(sampled(policy, temperature=1.0, max_new_tokens=20), policy, 1.0, tolerance)
    assert len(graph_steps) == 6


def test_a_graph_draws_as_the_shared_rows_do_in_the_mean():
    policies = {}
    for decoding in ("static", "shared"):
        policies[decoding] = policy = random_policy("llama", recompute=False)
        policy.model.to("cuda")
        policy.decoding = decoding
    first = {name: sampled(policy, group_size=2000, max_new_tokens=2) for name, policy in policies.items()}
    counts = [torch.bincount(samples.token_ids[:, 1], minlength=61) for samples in first.values()]
    assert chi2_contingency(torch.stack(counts)[:, (counts[0] + counts[1]) > 10]).pvalue > 1e-4


def test_gradients_with_a_mask_are_finite_and_those_of_the_cpu():
    """A mask over 64, 128, ... tokens in bfloat16, with which cuDNN's kernel, now off, made NaN."""
    found = []
    ids = torch.randint(2, 61, (4, 57), generator=torch.Generator().manual_seed(1))
    for device in ("cpu", "cuda"):
        policy = random_policy("llama", recompute=False, dtype=torch.bfloat16)
        policy.model.to(device)
        use_fast_attention(policy.model, torch.device(device))
        response_log_probs(policy, [[7, 8, 9, 12, 3, 4, 5], [10, 11]], ids.to(device), temperature=1.0).sum().backward()
        found.append(torch.cat([p.grad.flatten().cpu() for p in policy.model.parameters()]))
    assert bool(found[1].isfinite().all())
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


@pytest.mark.parametrize("vocabulary", [2000, 50_000])
def test_of_a_single_row_only_what_has_a_probability_is_drawn(vocabulary):
    """A device may scan one row by a kernel whose sums go up and down where nothing is added."""
    random = torch.Generator("cuda").manual_seed(0)
    for _ in range(50):
        probabilities = torch.rand(1, vocabulary, generator=random, device="cuda")
        probabilities[torch.rand(1, vocabulary, generator=random, device="cuda") < 0.9] = 0
        row_of = torch.zeros(10_000, dtype=torch.int64, device="cuda")
        found = sample_tokens(probabilities, random, row_of)[:, 0]
        assert bool((probabilities[0, found] > 0).all())


def test_shared_prompts_on_the_device_are_deterministic():
    """The CPU's log-probs and gradient, and the same bits every time."""
    ids = torch.randint(2, 61, (6, 10), generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "cuda", "cuda"):
        policy = random_policy("llama", recompute=False)
        policy.model.to(device)
        log_probs = response_log_probs(policy, [[7, 8, 9, 12], [10, 11]], ids.to(device), temperature=0.9)
        log_probs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        found.append((log_probs.detach().cpu(), gradient.cpu()))
    expected, once, again = found
    for value, other, same in zip(once, expected, again, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-3)
        assert torch.equal(value, same)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_the_device_trains_and_resumes(tmp_path, dtype):
    # With one minibatch the first update is that of the policy that sampled: its KL is rounding.
    where = ("trainer.device=cuda", f"model.compute_dtype={dtype}", "trainer.minibatches=1")
    trainer = train(tmp_path / "run", *where)
    assert trainer.policy.device.type == "cuda"
    before = rows(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "run" / "checkpoints" / "step_000006").rename(tmp_path / "gone")
    train(tmp_path / "run", *where, resume=True)
    assert [r["step"] for r in rows(tmp_path / "run" / "metrics.jsonl")] == [r["step"] for r in before]
    assert abs(before[0]["answer/kl"]) < (1e-5 if dtype == "float32" else 1e-3)
