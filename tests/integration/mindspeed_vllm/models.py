"""The tiny models, and what is sampled of them.

Heads of 32, the smallest that vLLM's build for CPUs knows, and a vocabulary of 64, to which vLLM would pad.
"""

from coca_mindspeed.local.tiny_model import tiny_config
from tests.integration.mindspeed import tiny

NEW_TOKENS = 8  # of greedy responses
ROLLOUTS = 8  # in a row, from the same weights


def _qwen2(**changes):
    config = tiny_config(tiny.VOCABULARY_OF_64)
    for name, value in {"num_attention_heads": 2, "num_key_value_heads": 2, **changes}.items():
        setattr(config, name, value)
    return config


MODELS = {
    "tied Qwen2": _qwen2,  # as 1.5B and 3B are
    "Qwen2": lambda: _qwen2(tie_word_embeddings=False),  # as 7B is
    "Llama 3": lambda: tiny.llama_config(
        tiny.VOCABULARY_OF_64, hidden_size=128, intermediate_size=192, rope_theta=100.0, initializer_range=0.08
    ),
}
