"""Prompts that start alike: the start is run once, and nobody can tell."""

import pytest
import torch
from transformers import DynamicCache

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.policy import load_policy, recompute_layers
from coca_mindspeed.local.prefill import run_prompts
from coca_mindspeed.local.sampler import sample_responses
from tests.local.models_for_tests import write_random_model

START = list(range(5, 45))


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def policy(request, tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_policy(path, ModelConfig(), torch.device("cpu"))


def passes(policy, prompts):
    """Tokens that each pass of the model saw, ``(rows, columns)``, and what they left behind."""
    seen = []

    def forward(**inputs):
        seen.append(tuple(inputs["input_ids"].shape))
        return policy.model(**inputs).logits

    cache = DynamicCache(config=policy.model.config)
    return seen, run_prompts(forward, prompts, cache, policy.pad_id, policy.device), cache


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[*START, 50, 51], [*START, 60, 61, 62], [*START, 50, 52]], [(1, 40), (3, 3)]),
        ([[*START, 50], [*START, 51]], [(1, 40), (2, 1)]),
        ([[*START, 50], START], [(1, 39), (2, 2)]),  # one is the other's start: it keeps its last token
        ([START, START, START], [(1, 39), (3, 1)]),
        ([[*START[:16], 50], [*START[:16], 51]], [(1, 16), (2, 1)]),
        ([[*START[:15], 50], [*START[:15], 51]], [(2, 16)]),  # too short to be worth a pass
        ([[4, *START], [3, *START]], [(2, 41)]),
        ([START], [(1, 40)]),
        ([[7], [8, 9]], [(2, 2)]),
    ],
)
def test_what_is_run_once(policy, prompts, expected):
    with torch.no_grad():
        seen, passed, cache = passes(policy, prompts)
    assert seen == expected
    assert passed.lengths.tolist() == [len(prompt) for prompt in prompts]
    assert passed.width == cache.get_seq_length() == max(map(len, prompts))
    assert passed.mask is None or passed.mask.sum(dim=1).tolist() == passed.lengths.tolist()
    with torch.no_grad():
        for logits, prompt in zip(passed.output[:, -1], prompts, strict=True):
            torch.testing.assert_close(logits, policy.model(torch.tensor([prompt])).logits[0, -1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("ends", [[[50, 51], [60, 61, 62], [50]], [[50, 51], [60, 61], [70, 71]]])
def test_log_probs_and_gradients_are_those_of_each_prompt_alone(policy, ends, recomputed, tmp_path):
    if recomputed:  # a model of its own: it cannot be undone
        path = write_random_model(tmp_path / "model", policy.model.config.model_type)
        policy = load_policy(path, ModelConfig(), torch.device("cpu"))
        recompute_layers(policy.model)
    prompts = [[*START, *end] for end in ends]
    tokens = torch.randint(5, 100, (6, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for share in (True, False):
        policy.model.zero_grad()
        log_probs = response_log_probs(policy, prompts, tokens, temperature=0.8, share_prompts=share)
        log_probs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        found.append((log_probs.detach(), gradient))
    (log_probs, gradient), (expected, plain) = found
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=1e-4)
    assert float(plain.norm()) > 0
    assert float((gradient - plain).norm() / plain.norm()) < 1e-5


def test_the_sampler_knows_the_log_probs_of_each_prompt_alone(policy):
    prompts = [[*START, 50, 51], [*START, 60, 61, 62], [*START, 50]]
    samples = sample_responses(
        policy,
        prompts,
        group_size=8,
        max_new_tokens=12,
        temperature=1.0,
        generator=torch.Generator().manual_seed(3),
    )
    assert len(set(samples.lengths.tolist())) > 2, "rows should leave the batch on the way"
    for i, prompt in enumerate(prompts):
        rows = slice(8 * i, 8 * i + 8)
        with torch.no_grad():
            alone = response_log_probs(policy, [prompt], samples.token_ids[rows], temperature=1.0, share_prompts=False)
        inside = torch.arange(alone.shape[1]) < samples.lengths[rows, None]
        torch.testing.assert_close(samples.log_probs[rows][inside], alone[inside], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("start", "group_size", "passes"),
    [([5, 6], 1, 1), ([5, 6], 2, 2), (START, 1, 3)],
    ids=["nothing", "group", "start"],
)
def test_a_pass_is_only_added_where_something_is_shared(policy, start, group_size, passes, monkeypatch):
    """One response a prompt, as a supervised stage has them: prompts and responses go through at once."""
    widths, forward = [], policy.model.model.forward

    def counted(**inputs):
        widths.append(inputs["input_ids"].shape[1])
        return forward(**inputs)

    monkeypatch.setattr(policy.model.model, "forward", counted)
    prompts = [[*start, 50, 51], [*start, 60]]
    tokens = torch.randint(5, 100, (2 * group_size, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = response_log_probs(policy, prompts, tokens, temperature=1.0)
        assert len(widths) == passes
        assert sum(widths) == len(start) + 2 + 6
        expected = response_log_probs(policy, prompts, tokens, temperature=1.0, share_prompts=False)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
