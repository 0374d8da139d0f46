"""The form of the prompts that a tier sends, or ``serve --model`` renders, around a client's messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.config.prompt_form import PromptForm, join_system
from coca_mindspeed.errors import did_you_mean
from coca_router.openai_api import ApiError, ChatRequest

#: The header by which a request names its category.
CATEGORY_HEADER = "x-coca-category"
#: The value of the key ``category`` with which each request names its own.
BY_REQUEST = "request"


@dataclass(frozen=True)
class ServedPrompt:
    """A form, and which of its instructions follows a question.

    A message that has its part of the form already, as `coca-mindspeed collect` sends it, is taken as it is.
    """

    form: PromptForm
    category: str | None = None  # of every request, or BY_REQUEST; None: the form has no instruction

    @classmethod
    def without_instruction(cls, system_prompt: str | None, *, thinking: bool = False) -> "ServedPrompt":
        return cls(PromptForm(system_prompt=system_prompt, instructions={}, thinking=thinking))

    @classmethod
    def of_form(cls, form: PromptForm, category: str | None, *, key: str) -> "ServedPrompt":
        """Check ``category``, None for the only one of ``form``; ConfigError, which begins with ``key``."""
        return cls(form, BY_REQUEST if category == BY_REQUEST else form.category(category, key=key))

    @property
    def by_request(self) -> bool:
        return self.category == BY_REQUEST

    def digests(self) -> set[str]:
        """The digests of all prompts that may be sent."""
        if self.by_request:
            return set(self.form.digests().values())
        return {self.form.digest(self._instruction(None))}

    def digest(self, request: ChatRequest, category: str | None) -> str:
        """The digest of one request's prompt, with the client's own system message."""
        first = self.messages(request, category)[0]
        system = first["content"] if first["role"] == "system" else None
        form = self.form.model_copy(update={"system_prompt": system})
        return form.digest(self._instruction(category))

    def check(self, category: str | None) -> None:
        """Raise ApiError 400 if a request has to name its category, and names none or an unknown one."""
        if self.by_request and category not in self.form.instructions:
            near = "" if category is None else did_you_mean(category, self.form.instructions)
            expected = ", ".join(self.form.instructions)
            message = f"{CATEGORY_HEADER}: expected one of {expected}, found {category or 'no such header'}{near}"
            raise ApiError(400, message, param=CATEGORY_HEADER, code="category")

    def messages(self, request: ChatRequest, category: str | None) -> list[Mapping[str, Any]]:
        """The client's messages, with the system prompt before theirs and the instruction behind the last question."""
        messages: list[Mapping[str, Any]] = [message.as_dict() for message in request.messages]
        if (instruction := self._instruction(category)) is not None:
            last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
            if last is not None and not (text := messages[last]["content"] or "").endswith(instruction):
                messages[last] = {**messages[last], "content": text + instruction}
        has_system = messages[0]["role"] == "system"
        if system := join_system(self.form.system_prompt, messages[0]["content"] if has_system else None):
            messages[: int(has_system)] = [{**(messages[0] if has_system else {"role": "system"}), "content": system}]
        return messages

    def _instruction(self, category: str | None) -> str | None:
        """The text behind a question; None: it belongs to the question."""
        return self.form.instructions.get((category if self.by_request else self.category) or "", "")


def check_category(prompts: Sequence[ServedPrompt], category: str | None) -> None:
    """Raise ApiError 400 for a ``category`` that is missing or unknown, or that none of ``prompts`` would use."""
    if category is not None and not any(prompt.by_request for prompt in prompts):
        message = f"{CATEGORY_HEADER}: no tier here has category: {BY_REQUEST}; leave the header out"
        raise ApiError(400, message, param=CATEGORY_HEADER, code="category")
    for prompt in prompts:
        prompt.check(category)
