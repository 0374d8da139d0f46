"""Lengths of prompts and responses against a model's context, without its weights."""

from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import GPT2Config, LlamaConfig, Phi3Config

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.prompts import encode_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.local.model_files import context_limit, load_model_tokenizer
from coca_mindspeed.local.prompt_checks import LengthLimits, check_lengths
from coca_mindspeed.local.tiny_model import tiny_config, tiny_tokenizer
from tests.local.models_for_tests import check_model, write_random_model
from tests.local.runs_for_tests import QUESTIONS

_LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
_PHI3 = {"original_max_position_embeddings": 512, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
SYSTEM = "State your confidence."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "llama")


@pytest.mark.parametrize(
    ("kind", "positions", "own", "tokens", "reason"),
    [
        (LlamaConfig, 2048, {}, 2048, "max_position_embeddings=2048"),
        (GPT2Config, 1024, {}, 1024, "max_position_embeddings=1024"),
        (LlamaConfig, 2048, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 2048, "NTK"),
        (LlamaConfig, 2048, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192, "linear"),
        (LlamaConfig, 4096, {"rope_scaling": _YARN}, 8192, "yarn"),
        (Phi3Config, 8192, {**_PHI3, "rope_scaling": _LONG_ROPE}, 512, "LongRoPE"),
    ],
)
def test_the_context_is_read_from_the_models_configuration(kind, positions, own, tokens, reason):
    limit = context_limit(kind(max_position_embeddings=positions, **own))
    assert limit.tokens == tokens
    assert reason in limit.reason


def records() -> list[Record]:
    return [Record(str(i), "d", "math", row["question"], row["answer"]) for i, row in enumerate(QUESTIONS)]


def prompts_of(model: Path) -> list[list[int]]:
    return encode_prompts(load_model_tokenizer(model, ModelConfig()), records(), SYSTEM)


def test_the_last_token_may_stand_on_the_last_position(model):
    longest = max(map(len, prompts_of(model)))
    check = LengthLimits(2048, 512 - longest)
    check_model(model, ModelConfig(), records(), SYSTEM, check)
    with pytest.raises(ConfigError, match="max_position_embeddings=512"):
        check_model(model, ModelConfig(), records(), SYSTEM, LengthLimits(2048, 513 - longest))


def test_the_length_check_counts_what_compatibility_forms_expand():
    """One character of three bytes becomes 18, of 33 bytes."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    long = Record("a", "d", "math", "\ufdfa" * 20, "1", None, {"instruction": ""})
    with pytest.raises(DataError, match="has 361 tokens"):
        check_lengths(tokenizer, tiny_config(), [long], None, LengthLimits(200, 0), "the model", show_progress=False)
