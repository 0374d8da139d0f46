"""How model families write chat messages, as MindSpeed-RL's prompt templates say it.

The layouts are facts about Qwen2.5-Instruct's and Llama-3-Instruct's tokenizers.  Both families cut text at their
special tokens, so that a message's tokens do not depend on its neighbours: MindSpeed-RL, which encodes system and
user part one by one, can meet the chat template token for token.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """One family's layout.

    Attributes:
        name: of the family, for ``--template``.
        system: the system message around ``{{content}}``.
        user: the user message around ``{{content}}``, up to where the response begins.
        separator: between turns.
        stop: the token that ends a response.
        begins_with_bos: whether the prompt starts with the tokenizer's BOS token.
        strips: whether the chat template strips white space around a message.
    """

    name: str
    system: str
    user: str
    separator: str
    stop: str
    begins_with_bos: bool
    strips: bool

    def message(self, text: str) -> str:
        """A message's text as the chat template writes it."""
        return text.strip() if self.strips else text

    def template(self, system_prompt: str, suffix: str) -> dict[str, Any]:
        """A prompt template of MindSpeed-RL with this system prompt, and this after every question."""
        template: dict[str, Any] = {
            "name": f"coca_{self.name}",
            "format_user": {"slots": [self.user.replace("{{content}}", "{{content}}" + suffix)]},
            "format_system": {"slots": [self.system]},
            "format_separator": {"slots": [self.separator]},
            "default_system": self.message(system_prompt),
            "stop_words": [self.stop],
            "replace_eos": True,
        }
        if not self.separator:
            del template["format_separator"]
        if self.begins_with_bos:
            template["format_prefix"] = {"slots": [["bos_token"]]}
        return template

    def encode(self, tokenizer: Any, template: dict[str, Any], question: str, system: str) -> list[int]:
        """Token ids as MindSpeed-RL makes them of :meth:`template`: its parts are encoded one by one and joined."""
        head = [tokenizer.bos_token_id] if self.begins_with_bos else []
        parts = (
            self.system.replace("{{content}}", system or template["default_system"], 1),
            template["format_user"]["slots"][0].replace("{{content}}", question, 1),
        )
        return [*head, *(token for part in parts for token in tokenizer.encode(part, add_special_tokens=False))]


LAYOUTS = {
    layout.name: layout
    for layout in (
        ChatLayout(
            name="qwen",
            system="<|im_start|>system\n{{content}}<|im_end|>\n",
            user="<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n",
            separator="\n",
            stop="<|im_end|>",
            begins_with_bos=False,
            strips=False,
        ),
        ChatLayout(
            name="llama3",
            system="<|start_header_id|>system<|end_header_id|>\n\n{{content}}<|eot_id|>",
            user="<|start_header_id|>user<|end_header_id|>\n\n{{content}}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            separator="",
            stop="<|eot_id|>",
            begins_with_bos=True,
            strips=True,
        ),
    )
}
