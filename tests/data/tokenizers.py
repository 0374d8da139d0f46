"""Tokenizer directories with the chat layouts of Qwen2.5-Instruct and Llama-3-Instruct."""

from functools import cache

from tests.tokenizers_for_tests import llama3_like, qwen_like

# Line ends are written as expressions: Jinja strips those around block tags.
CHAT_TEMPLATES = {
    "qwen": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a model.<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
}


@cache
def _saved(family):
    tokenizer = {"qwen": qwen_like, "llama3": llama3_like}[family]()
    copy = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    copy.chat_template = CHAT_TEMPLATES[family]
    return copy


def save_tokenizer(family, directory):
    """Write the tokenizer of a family (``qwen`` or ``llama3``) and return its directory."""
    _saved(family).save_pretrained(str(directory))
    return directory
