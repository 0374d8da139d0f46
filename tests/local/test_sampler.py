"""The sampler and the update's forward pass, on the architectures and templates that users have."""

from pathlib import Path

import pytest
import torch

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.policy import choose_device, load_policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.tiny_model import write_tiny_model
from tests.local.models_for_tests import write_random_model

RECORDS = [
    Record("1", "d", "math", "1+1?", "2"),
    Record("2", "d", "math", "What is the sum of 12 and 30?", "42"),
    Record("3", "d", "factual", "数学 🙂?", "x"),
]


@pytest.fixture(params=["qwen2", "llama"])
def policy(request, tmp_path):
    path = write_random_model(tmp_path / "model", request.param)
    return load_policy(path, ModelConfig(), torch.device("cpu"))


def prompts_of(policy, records=RECORDS):
    return policy.encode_prompts(records, CONFIDENCE_FIRST_PROMPT, 500)


def sample(policy, prompts, seed=0, **changes):
    arguments = {"group_size": 4, "max_new_tokens": 24, "temperature": 1.0, **changes}
    return sample_responses(policy, prompts, generator=torch.Generator().manual_seed(seed), **arguments)


def no_cache_log_probs(policy, samples, temperature=1.0):
    """Oracle: each response alone, without cache, mask or padding."""
    group = len(samples.token_ids) // len(samples.prompts)
    rows = []
    for i, length in enumerate(samples.lengths.tolist()):
        prompt, response = samples.prompts[i // group], samples.token_ids[i, :length].tolist()
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logits = policy.logits_of_policy(logits, temperature)
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_policy(policy, temperature):
    samples = sample(policy, prompts_of(policy), temperature=temperature)
    assert len(set(samples.lengths.tolist())) > 2, "the rows should end at different times"
    for i, expected in enumerate(no_cache_log_probs(policy, samples, temperature)):
        length = int(samples.lengths[i])
        torch.testing.assert_close(samples.log_probs[i, :length], expected, atol=2e-5, rtol=1e-4)
        assert bool((samples.log_probs[i, length:] == 0).all())
        assert bool((samples.token_ids[i, length:] == policy.pad_id).all())


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_update_sees_the_same_log_probs_as_the_sampler(policy, share_prompts):
    samples = sample(policy, prompts_of(policy), temperature=0.8)
    again = response_log_probs(policy, samples.prompts, samples.token_ids, temperature=0.8, share_prompts=share_prompts)
    inside = torch.arange(samples.token_ids.shape[1]) < samples.lengths[:, None]
    torch.testing.assert_close(again[inside], samples.log_probs[inside], atol=2e-5, rtol=1e-4)


def test_shared_prompts_give_the_same_gradient(policy):
    samples = sample(policy, prompts_of(policy))
    inside = torch.arange(samples.token_ids.shape[1]) < samples.lengths[:, None]
    gradients = []
    for share in (True, False):
        policy.model.zero_grad()
        log_probs = response_log_probs(policy, samples.prompts, samples.token_ids, temperature=1.0, share_prompts=share)
        log_probs[inside].square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    assert float(gradients[0].norm()) > 0
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5


def test_responses_end_at_any_eos_or_at_the_limit(policy):
    samples = sample(policy, prompts_of(policy), group_size=64)
    seen = set()
    for ids, length, finished in zip(samples.token_ids, samples.lengths.tolist(), samples.finished, strict=True):
        body, last = ids[: length - 1].tolist(), int(ids[length - 1])
        assert not set(body) & set(policy.eos_ids)
        assert (last in policy.eos_ids) == bool(finished)
        assert finished or length == 24
        seen.add(last if finished else None)
    assert None in seen, "the limit should occur"
    assert len(seen) > 5, "several of the end tokens should occur"


def test_pad_is_never_sampled_unless_it_ends_the_text(tmp_path):
    policy = load_policy(write_random_model(tmp_path / "m", "qwen2"), ModelConfig(), torch.device("cpu"))
    head = policy.model.get_output_embeddings().weight
    with torch.no_grad():  # make PAD the most likely token by far
        head[policy.pad_id] = 5 * head.mean(0) + 3.0
    samples = sample(policy, prompts_of(policy), group_size=32)
    inside = torch.arange(samples.token_ids.shape[1]) < samples.lengths[:, None]
    assert policy.pad_id not in samples.token_ids[inside].tolist()
    llama = load_policy(write_random_model(tmp_path / "l", "llama"), ModelConfig(), torch.device("cpu"))
    assert llama.pad_id in llama.eos_ids  # no padding token of its own: ending must stay possible
    assert bool(sample(llama, prompts_of(llama), group_size=64).finished.any())


def test_batching_changes_memory_not_the_shape_of_the_result(policy):
    samples = sample(policy, prompts_of(policy), batch_responses=5)
    assert samples.token_ids.shape[0] == 12
    for i, expected in enumerate(no_cache_log_probs(policy, samples)):
        torch.testing.assert_close(samples.log_probs[i, : len(expected)], expected, atol=2e-5, rtol=1e-4)


def test_sampling_follows_the_distribution(policy):
    """First tokens of 4,000 samples against the model's own probabilities (chi-square over its likeliest tokens)."""
    prompts = prompts_of(policy)[:1]
    samples = sample(policy, prompts, group_size=4000, max_new_tokens=1)
    with torch.no_grad():
        logits = policy.logits_of_policy(policy.model(torch.tensor(prompts)).logits[0, -1], 1.0)
    expected = logits.softmax(-1) * 4000
    counts = torch.bincount(samples.token_ids[:, 0], minlength=len(expected))
    likely = expected > 20
    chi_square = float(((counts - expected).square() / expected)[likely].sum())
    assert int(likely.sum()) > 5
    assert chi_square < 2.0 * int(likely.sum()) + 20


def test_the_seed_decides(policy):
    prompts = prompts_of(policy)
    assert torch.equal(sample(policy, prompts, 1).token_ids, sample(policy, prompts, 1).token_ids)
    one, two = sample(policy, prompts, 1), sample(policy, prompts, 2)
    assert one.token_ids.shape != two.token_ids.shape or not torch.equal(one.token_ids, two.token_ids)


def test_entropy_is_the_mean_over_the_response(policy):
    samples = sample(policy, prompts_of(policy)[:1], group_size=1, max_new_tokens=1)
    with torch.no_grad():
        p = policy.logits_of_policy(policy.model(torch.tensor(samples.prompts)).logits[0, -1], 1.0).softmax(-1)
    assert float(samples.entropy[0]) == pytest.approx(float(-(p[p > 0] * p[p > 0].log()).sum()), rel=1e-4)


def test_the_chat_template_lays_out_the_papers_prompt(policy):
    text = policy.tokenizer.decode(prompts_of(policy)[0])
    assert CONFIDENCE_FIRST_PROMPT in text
    assert "1+1? Please reason step by step, and put your final answer within \\boxed{}." in text
    factual = policy.tokenizer.decode(prompts_of(policy)[2])
    assert "step by step" not in factual


def test_a_prompt_that_is_too_long_is_an_error(policy):
    with pytest.raises(DataError, match=r"record '1' of d: its prompt has \d+ tokens, expected 1 to 10"):
        policy.encode_prompts(RECORDS, None, 10)


def test_the_tiny_model_is_a_plain_directory(tmp_path):
    write_tiny_model(tmp_path / "tiny", seed=0)
    policy = load_policy(tmp_path / "tiny", ModelConfig(), torch.device("cpu"))
    record = Record("a", "arithmetic", "math", "0012+0034", "64", metadata={"instruction": ""})
    (prompt,) = policy.encode_prompts([record], CONFIDENCE_FIRST_PROMPT, 32)
    assert policy.tokenizer.convert_ids_to_tokens(prompt) == list("0012+0034=")
    assert sum(p.numel() for p in policy.model.parameters()) < 120_000
    response = "<confidence>0.83</confidence>64"
    ids = torch.tensor([[*policy.tokenizer(response, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]])
    assert policy.text.decode(ids, torch.tensor([ids.shape[1]])) == [response]


@pytest.mark.parametrize("broken", ["nothing", "empty", "weights", "template"])
def test_a_directory_that_does_not_load_is_named(tmp_path, broken):
    path = tmp_path / "model"
    if broken != "nothing":
        write_random_model(path, "qwen2")
    if broken == "empty":
        (path / "config.json").unlink()
    if broken == "weights":
        (path / "model.safetensors").write_bytes(b"not weights")
    if broken == "template":
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            Path(path / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"model\.path="):
        load_policy(path, ModelConfig(), torch.device("cpu"))


def test_a_cuda_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda:99: PyTorch sees"):
        choose_device("cuda:99")
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda:9{20}: expected auto"):
        choose_device("cuda:" + "9" * 20)
