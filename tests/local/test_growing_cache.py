"""The sampler's cache holds what transformers' own holds, and steps copy nothing that is there already."""

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import prefill as prefill
from coca_mindspeed.local import sampler
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.prefill import cache_bytes, preallocated_cache, repeat_rows
from tests.local.models_for_tests import write_random_model

CONFIG = LlamaConfig(num_hidden_layers=2)


def states(rows, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, tokens, 3, 4, generator=generator).transpose(1, 2) for _ in range(2))


def grow(cache, steps, seed=0):
    """Two prompts, repeated, then token by token; every fifth step the first row leaves."""
    rows = 2
    for layer in range(2):
        cache.update(*states(rows, 7, seed + layer), layer)
    cache.batch_repeat_interleave(5)
    rows = 10
    for step in range(steps):
        for layer in range(2):
            yield cache.update(*states(rows, 1, 100 * step + layer), layer)
        if step % 5 == 4 and rows > 1:
            cache.batch_select_indices(torch.arange(1, rows))
            rows -= 1


def test_it_holds_what_the_plain_cache_holds():
    for found, expected in zip(
        grow(preallocated_cache(CONFIG), 60), grow(DynamicCache(config=CONFIG), 60), strict=True
    ):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_rows_that_are_repeated_are_those_of_the_plain_cache():
    """Some several times, and in the layers with a sliding window, which transformers keeps, as well."""
    config = Gemma2Config(num_hidden_layers=2, sliding_window=5)
    caches = [preallocated_cache(config), DynamicCache(config=config)]
    rows = 3
    for step, again in enumerate([[0], [], [1, 1, 3], [6, 0, 2, 4, 5, 5], [], [12]]):
        for layer in range(2):
            found, expected = (
                cache.update(*states(rows, 4 if step == 0 else 1, 10 * step + layer), layer) for cache in caches
            )
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
        if again:
            repeat_rows(caches[0], torch.tensor(again), rows, 16)
            caches[1].batch_select_indices(torch.tensor([*range(rows), *again]))
            rows += len(again)


@pytest.mark.parametrize(("small", "moves"), [(0, 3), (2**24, 1)])  # to 16, 32 and 64 rows, or to all at once
def test_rows_to_come_have_room(small, moves, monkeypatch):
    monkeypatch.setattr(prefill, "_SMALL", small)
    cache = preallocated_cache(LlamaConfig(num_hidden_layers=1), 20)
    cache.update(*states(8, 5, 0), 0)
    places = []
    for _ in range(56):
        repeat_rows(cache, torch.tensor([3]), len(cache.layers[0].keys), 64)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(cache.layers[0].keys) == 64
    assert len(set(places)) == moves
    assert cache_bytes(cache) == 2 * 64 * 3 * 20 * 4 * 4  # and none beyond the most


def test_most_steps_leave_the_cache_in_its_place():
    cache = preallocated_cache(CONFIG)
    places = {keys.data_ptr() for keys, _ in grow(cache, 4)}
    assert len(places) == 2  # one a layer
    assert cache.get_seq_length() == 11
    long = preallocated_cache(CONFIG)
    for layer in range(2):
        long.update(*states(1, 7, layer), layer)
    long.batch_repeat_interleave(2)
    moves, place = 0, None
    for step in range(1000):
        keys, _ = long.update(*states(2, 1, step), 0)
        moves, place = moves + (keys.data_ptr() != place), keys.data_ptr()
    assert moves <= 14


def test_sliding_layers_stay_transformers_own():
    config = Gemma2Config(num_hidden_layers=4, sliding_window=5)
    kinds = [layer.is_sliding for layer in preallocated_cache(config).layers]
    assert kinds == [layer.is_sliding for layer in DynamicCache(config=config).layers]
    assert any(kinds)
    assert not all(kinds)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("prompts", [[[5, 6, 7], [8, 9, 10]], [[5, 6, 7], [8]]], ids=["equal", "mixed"])
def test_the_same_seed_samples_the_same_responses_as_with_the_plain_cache(tmp_path, architecture, prompts, monkeypatch):
    policy = load_policy(write_random_model(tmp_path / "m", architecture), ModelConfig(), torch.device("cpu"))
    arguments = {"group_size": 8, "max_new_tokens": 40, "temperature": 1.0}
    found = sampler.sample_responses(policy, prompts, generator=torch.Generator().manual_seed(0), **arguments)
    monkeypatch.setattr(sampler, "preallocated_cache", lambda config, most: DynamicCache(config=config))
    expected = sampler.sample_responses(policy, prompts, generator=torch.Generator().manual_seed(0), **arguments)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
