"""Sampling: shared decoder rows, inverse-CDF draws, and their edges; test_decoding compares with plain passes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local import sampler
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import choose_device
from coca_mindspeed.local.sampler import SharedRows, sample_responses
from tests.local.models_for_tests import sample_tokens, write_random_model

RECORDS = [
    Record("1", "d", "math", "1+1?", "2"),
    Record("2", "d", "math", "What is the sum of 12 and 30?", "42"),
    Record("3", "d", "factual", "数学 🙂?", "x"),
]


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def policy(request, tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_policy(path, ModelConfig(), torch.device("cpu"))


def prompts_of(policy, records=RECORDS):
    return policy.encode_prompts(records, SYSTEM_PROMPTS["first"])


def sample(policy, prompts, seed=0, **changes):
    arguments = {"group_size": 4, "max_new_tokens": 24, "temperature": 1.0, **changes}
    return sample_responses(policy, prompts, generator=torch.Generator().manual_seed(seed), **arguments)


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


def test_a_cuda_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda:99: PyTorch sees"):
        choose_device("cuda:99")
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda:9{20}: expected auto"):
        choose_device("cuda:" + "9" * 20)


CPU = torch.device("cpu")


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_row_is_what_its_responses_have_said(data):
    prompts, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    said = [(f"prompt {n // group}",) for n in range(prompts * group)]  # of the responses that go on
    rows = [(f"prompt {n}",) for n in range(prompts)]  # of the decoder
    shared = SharedRows(prompts, group, CPU)
    vocabulary = st.sampled_from([0, 3, 151_935])
    for _ in range(data.draw(st.integers(1, 8))):
        tokens = data.draw(st.lists(vocabulary, min_size=len(said), max_size=len(said)))
        going = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(said), max_size=len(said)))
        if not any(going):
            break
        said = [(*before, token) for before, token, goes in zip(said, tokens, going, strict=True) if goes]
        keep, repeat, token = shared.append(torch.tensor(going), torch.tensor(tokens)[:, None])
        if keep is not None:
            rows = [rows[row] for row in keep.tolist()]
        if repeat is not None:
            rows += [rows[row] for row in repeat.tolist()]
        rows = [(*row, appended) for row, appended in zip(rows, token[:, 0].tolist(), strict=True)]
        assert [rows[row] for row in shared.row_of.tolist()] == said
        assert len(set(shared.row_of.tolist())) == len(set(said))  # no two rows for what is the same
        assert len(set(said)) > 0.9 * len(rows) or keep is not None


def test_responses_share_a_row_of_the_decoder_while_they_are_alike(policy, monkeypatch):
    ran, step = [], sampler.Decoder.step

    def counted(self, token):
        ran.append(len(token))
        step(self, token)

    monkeypatch.setattr(sampler.Decoder, "step", counted)
    prompts = [[5, 6, 7], [8]]
    samples = sample(policy, prompts, group_size=16, max_new_tokens=30, temperature=0.05)  # they begin alike
    assert sum(ran) < 0.8 * int((samples.lengths - 1).sum())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("vocabulary", [600, 4095, 4096, 5000, 49_152])
def test_frequencies_are_the_probabilities(vocabulary):
    """A few likely tokens in far places, first and last ones among them, and the rest in classes of tokens."""
    logits = torch.randn(vocabulary, generator=seeded()) * 2
    for token, logit in ((0, 9.0), (255, 8.5), (256, 8.0), (vocabulary - 1, 9.5), (vocabulary // 2, 10.0)):
        logits[token] = logit
    probabilities = logits.softmax(0)
    draws = 8_000
    found = sample_tokens(probabilities.expand(draws, -1), seeded(1))
    assert found.shape == (draws, 1)
    assert found.dtype == torch.int64
    singles = torch.tensor([0, 255, 256, vocabulary - 1, vocabulary // 2])
    group = torch.arange(vocabulary) % 7 + len(singles)
    group[singles] = torch.arange(len(singles))
    counts = torch.bincount(group[found[:, 0]], minlength=len(singles) + 7)
    expected = torch.zeros(len(singles) + 7, dtype=torch.float64).index_add_(0, group, probabilities.double())
    assert chisquare(counts, expected / expected.sum() * draws).pvalue > 1e-4


def test_every_row_has_its_own_distribution():
    for vocabulary in (21, 5000):
        probabilities = torch.zeros(300, vocabulary)
        targets = torch.randint(vocabulary, (300,), generator=seeded())
        probabilities[torch.arange(300), targets] = 0.25
        assert torch.equal(sample_tokens(probabilities, seeded())[:, 0], targets)
        again = torch.tensor([7, 7, 299, 0])
        assert torch.equal(sample_tokens(probabilities, seeded(), again)[:, 0], targets[again])


@pytest.mark.parametrize("share", [0.0, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("vocabulary", [3500, 4096, 5000])
def test_a_token_without_probability_is_never_drawn(monkeypatch, share, vocabulary):
    """Also where the uniform number is the least or the greatest there is, or is rounded beyond it."""
    probabilities = torch.zeros(3, vocabulary)
    probabilities[0, 1:3] = 0.5
    probabilities[1, [700, 3000]] = torch.tensor([1e-30, 1.0])
    probabilities[2, 300:400] = torch.rand(100, generator=seeded())
    monkeypatch.setattr(sampler.torch, "rand", lambda *size, **_: torch.full(size, share))
    found = sample_tokens(probabilities)
    assert bool((probabilities.gather(1, found) > 0).all())
    assert found[0, 0] == (1 if share == 0.0 else 2)


def test_improbable_blocks_are_drawn_to_the_token(monkeypatch):
    """Of a block of probability 1e-6: a single float32 could tell at most sixteen places in it apart."""
    probabilities = torch.zeros(1, 4096)
    probabilities[0, 0] = 1 - 1e-6
    probabilities[0, 1024:1280] = 1e-6 / 256
    random = seeded()

    rand = torch.rand

    def inside_the_block(draws, numbers, **_):
        found = rand(draws, numbers, generator=random)
        found[:, 0] = 1 - 1e-6 * found[:, 0]
        return found

    monkeypatch.setattr(sampler.torch, "rand", inside_the_block)
    found = sample_tokens(probabilities, row_of=torch.zeros(20_000, dtype=torch.int64))
    assert 1024 <= int(found.min()) <= int(found.max()) < 1280
    assert chisquare(torch.bincount(found[:, 0] - 1024, minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_what_is_no_distribution_is_refused(value, vocabulary):
    probabilities = torch.full((2, vocabulary), 1 / vocabulary)
    probabilities[1] = value
    with pytest.raises(NoDistributionError):
        sample_tokens(probabilities)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 300, 4095, 4999])
def test_one_number_that_is_not_finite_is_refused_wherever_the_draw_falls(value, place):
    probabilities = torch.full((1, 5000), 1e-9)
    probabilities[0, 300] = 1.0
    probabilities[0, place] = value
    with pytest.raises(NoDistributionError):
        sample_tokens(probabilities)


def test_the_seed_decides_and_the_global_state_is_left_alone():
    probabilities = torch.rand(8, 5000, generator=seeded())
    before = torch.random.get_rng_state()
    draws = [sample_tokens(probabilities, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.random.get_rng_state(), before)
