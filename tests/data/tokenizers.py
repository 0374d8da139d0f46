"""Tokenizer directories with the chat layouts of Qwen2.5-Instruct and Llama-3-Instruct."""

from tests.tokenizers_for_tests import llama3_like, qwen_like


def save_tokenizer(family, directory):
    """Write the tokenizer of a family (``qwen`` or ``llama3``) and return its directory."""
    {"qwen": qwen_like, "llama3": llama3_like}[family]().save_pretrained(str(directory))
    return directory
