"""Every decoder draws the tokens of plain passes: architecture x batch x device and path."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_mindspeed.local import static_decoder
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.static_decoder import STATIC
from tests.local.plain_passes import sample_as_plain
from tests.local.test_architectures import ARCHITECTURES, config_of

START = list(range(5, 45))
LONG = [3 + n % 60 for n in range(330)]
#: Prompts and temperature.
BATCHES = {
    "padding": ([[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]], 1.0),
    "common prefix": ([[*START, 50, 51], [*START, 60, 61, 62], [*START, 50, 52]], 0.7),
    "equal lengths": ([[5, 6, 7], [8, 9, 10]], 1.0),
    "start of another": ([[*START, 50], START], 1.0),
    "the same": ([START, START, START], 1.0),
    "one": ([[4, 5]], 1.0),
    "alike": ([[5, 6, 7], [8]], 0.05),  # at this temperature, responses begin with the same tokens
    "longer than a window": ([[*LONG, 50], [*LONG, 60, 61, 62]], 1.0),
}
MODELS = {**ARCHITECTURES, "large vocabulary": ("llama", {"vocab_size": 5000}, "prefix")}
_OF_ALL, _OF_ONE = ["padding", "common prefix"], {"few positions": "padding", "long window": "longer than a window"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def cases():
    for name, (architecture, _, sharing) in MODELS.items():
        batches = [_OF_ONE[name]] if name in _OF_ONE else _OF_ALL
        paths = ["shared", "static"] if architecture in STATIC and sharing == "prefix" else ["shared"]
        for batch in list(BATCHES)[:-1] if name in ("qwen2", "llama") else batches:
            several = batch in ("padding", _OF_ONE.get(name)) or name == "qwen2"
            marks = () if several else pytest.mark.nightly
            for path in paths:
                yield pytest.param(name, batch, path, "cpu", id=f"{name}-{batch}-{path}", marks=marks)
                yield pytest.param(name, batch, path, "cuda", id=f"{name}-{batch}-{path}-cuda", marks=needs_cuda)


@cache
def models_of(name):
    """A random model and the same with eager attention."""
    architecture, own, sharing = MODELS[name]
    found = []
    for attention in ("eager" if sharing == "none" else "sdpa", "eager"):
        torch.manual_seed(0)
        config = config_of(architecture, own)
        found.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())
    return found


@pytest.mark.parametrize(("name", "batch", "path", "device"), list(cases()))
def test_the_tokens_and_log_probs_of_plain_passes(name, batch, path, device, monkeypatch):
    if device == "cpu":  # so that a rollout crosses buckets
        monkeypatch.setattr(static_decoder, "ROW_BUCKET", 5)
        monkeypatch.setattr(static_decoder, "COLUMN_BUCKET", 7)
    model, plain = (each.to(device) for each in models_of(name))
    use_fast_attention(model, torch.device(device))
    eos_ids = tuple(range(1, model.config.get_text_config().vocab_size, 9))
    policy = Policy(model, None, None, eos_ids, 0, sharing=MODELS[name][2], decoding=path)
    prompts, temperature = BATCHES[batch]
    tested = name in ("qwen2", "llama")
    samples = sample_as_plain(
        policy,
        prompts,
        group_size=8 if tested else 3,
        new=4 if name == "few positions" else 24 if tested else 10,
        temperature=temperature,
        model=plain,
        tolerance=1e-4 if device == "cpu" else 1e-3,
    )
    assert policy.decoding == path, "the capture failed"
    if tested and batch == "padding":
        assert len(set(samples.lengths.tolist())) > 4
        assert len({tuple(set(ids) & set(eos_ids)) for ids in samples.token_ids.tolist()}) > 3
