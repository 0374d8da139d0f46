"""Prefill of a common prefix, and the preallocated KV cache."""

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import prefill
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.prefill import PreallocatedCache, prefill_prompts
from tests.local.models_for_tests import write_random_model

START = list(range(5, 45))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    return load_policy(path, ModelConfig(), torch.device("cpu"))


def passes(policy, prompts):
    """Shapes ``(rows, columns)`` of the tokens of each pass, the prefill and the cache."""
    seen = []

    def forward(**inputs):
        seen.append(tuple(inputs["input_ids"].shape))
        return policy.lm_head.hidden_states(**inputs)

    cache = DynamicCache(config=policy.model.config)
    return seen, prefill_prompts(forward, prompts, cache, policy.pad_id, policy.device), cache


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


def states(rows, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, tokens, 3, 4, generator=generator).transpose(1, 2) for _ in range(2))


def test_rows_that_are_repeated_are_those_of_the_plain_cache():
    """Some several times, and in the layers with a sliding window, which transformers keeps, as well."""
    config = Gemma2Config(num_hidden_layers=2, sliding_window=5)
    caches = [PreallocatedCache(config), DynamicCache(config=config)]
    rows = 3
    for step, again in enumerate([[0], [], [1, 1, 3], [6, 0, 2, 4, 5, 5], [], [12]]):
        for layer in range(2):
            found, expected = (
                cache.update(*states(rows, 4 if step == 0 else 1, 10 * step + layer), layer) for cache in caches
            )
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
        if again:
            caches[0].repeat_rows(torch.tensor(again), rows, 16)
            caches[1].batch_select_indices(torch.tensor([*range(rows), *again]))
            rows += len(again)


@pytest.mark.parametrize(("small", "moves"), [(0, 3), (2**24, 1)])  # to 16, 32 and 64 rows, or to all at once
def test_rows_to_come_have_room(small, moves, monkeypatch):
    monkeypatch.setattr(prefill, "SMALL_BYTES", small)
    cache = PreallocatedCache(LlamaConfig(num_hidden_layers=1), 20)
    cache.update(*states(8, 5, 0), 0)
    places = []
    for _ in range(56):
        cache.repeat_rows(torch.tensor([3]), len(cache.layers[0].keys), 64)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(cache.layers[0].keys) == 64
    assert len(set(places)) == moves
    assert cache.layers[0].keys.untyped_storage().nbytes() == 64 * 3 * 20 * 4 * 4  # and none beyond the most
