"""Tokens are drawn by their probabilities, from small vocabularies and from large ones."""

import math

import pytest
import torch
from scipy.stats import chisquare

from coca_mindspeed.local import sampler as token_draw
from coca_mindspeed.local.sampler import NoDistributionError, sample_tokens


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
    monkeypatch.setattr(token_draw.torch, "rand", lambda *size, **_: torch.full(size, share))
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

    monkeypatch.setattr(token_draw.torch, "rand", inside_the_block)
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


def test_the_seed_decides_and_the_global_state_is_left_alone():
    probabilities = torch.rand(8, 5000, generator=seeded())
    before = torch.random.get_rng_state()
    draws = [sample_tokens(probabilities, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.random.get_rng_state(), before)
