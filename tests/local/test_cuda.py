"""The same results on a CUDA device as on the CPU."""

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sampler import sample_responses, sample_tokens
from tests.local.models_for_tests import random_policy, response_log_probs, write_random_model
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
    inside = torch.arange(samples.width) < samples.lengths[:, None]
    for share in (True, False):
        expected = response_log_probs(on_cpu, prompts, samples.token_ids, temperature=0.9, share_prompts=share).detach()
        torch.testing.assert_close(samples.log_probs[inside], expected[inside], rtol=1e-3, atol=1e-3)
        again = response_log_probs(on_device, prompts, samples.token_ids.cuda(), temperature=0.9, share_prompts=share)
        torch.testing.assert_close(again.detach().cpu()[inside], expected[inside], rtol=1e-3, atol=1e-3)


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
