"""Chat templates: fixing variables and the date, and checks of rendered prompts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from coca_mindspeed.data.prompts import prompt_messages, render_chat
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError

#: Comment of a template that omits the system prompt on purpose.
NO_SYSTEM_PROMPT = "{#- no system prompt -#}"
_DIRECTIVES = (*(f"%-{x}" for x in "dmHIMSj"), "%e", *(f"%{x}" for x in "aAbBcdDfFHIjmMpSTuUVwWxXyYzZ"))
# <think>, </think>, [THINK], <seed:think>, <|START_THINKING|>, <|end_of_thought|>, <reasoning>
_THOUGHT_TAG = re.compile(r"[<\[]\|?(?P<name>/?[\w:]*(?:think|thought|reason)\w*)\|?[>\]]", re.IGNORECASE)
_CLOCK_READ = "the template reads the clock"
# A macro: transformers 5 turns a function given as a variable into text.
_REFUSED_CLOCK = f"{{% macro strftime_now(format) %}}{{{{ raise_exception({_CLOCK_READ!r}) }}}}{{% endmacro %}}"
_MAX_PROMPTS = 1000  # rendered for the checks


def write_into_template(tokenizer: Any, variables: Mapping[str, Any], day: date | None = None) -> None:
    """Write values of variables, and the date that ``strftime_now`` returns, into the tokenizer's chat template.

    The template is saved with the tokenizer, so that a server renders the prompts of training.  A value passed to
    ``apply_chat_template`` takes precedence.  ``variables`` are JSON values, such as ``enable_thinking: False``;
    ``day`` None leaves the clock's date.

    Raises:
        ConfigError: the template does not use a variable.
    """
    templates = tokenizer.chat_template
    source = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} does not use the variable {name!r}; "
                "see chat_template.jinja, or chat_template in tokenizer_config.json"
            )
    lines = [_date_line(day)] if day is not None and "strftime_now" in source else []
    lines += [f"{{% if {k} is not defined %}}{{% set {k} = {v!r} %}}{{% endif %}}" for k, v in variables.items()]
    head = "".join(f"{line}\n" for line in lines)  # transformers drops the newline after a block

    def with_head(template: str) -> str:
        return template if template.startswith(head) else head + template

    if isinstance(templates, dict):
        tokenizer.chat_template = {name: with_head(template) for name, template in templates.items()}
    else:
        tokenizer.chat_template = with_head(templates)


def _date_line(day: date) -> str:
    """A macro that replaces transformers' clock function ``strftime_now``."""
    replaced = "".join(f"|replace({key!r}, {_on(day, key)!r})" for key in _DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}"


def _on(day: date, directive: str) -> str:
    plain = day.strftime(directive.replace("-", ""))
    return (plain.lstrip("0") or "0") if "-" in directive else plain


def reads_clock(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether the template asks for the time when it renders ``messages``."""
    try:
        render_chat(tokenizer, messages, chat_template=_REFUSED_CLOCK + tokenizer.get_chat_template())
    except ConfigError as error:
        if str(error.__cause__) == _CLOCK_READ:
            return True
        raise
    return False


@dataclass(frozen=True, slots=True)
class TemplateKeys:
    """Names of an engine's settings for messages; ``day`` is advice for a template that reads the clock."""

    variables: str
    allow_open_thinking: str
    day: str


#: The keys of our own run configuration.
TEMPLATE_KEYS = TemplateKeys(
    "model.chat_template_kwargs", "model.allow_open_thinking", "set model.prompt_date=YYYY-MM-DD"
)


def check_template(
    tokenizer: Any,
    records: Sequence[Record],
    system_prompt: str | None,
    model: str,
    keys: TemplateKeys,
    *,
    allow_open_thinking: bool = False,
) -> None:
    """Check the rendered prompt of one record for each distinct system prompt.

    The run's variables and date are in the tokenizer's template; ``model`` (option and directory) and ``keys`` are for
    messages.  ``allow_open_thinking`` accepts prompts that end inside an open ``<think>``.

    Raises:
        ConfigError: a message is missing in the prompt, or the prompt ends inside an open thought or depends on the
            clock.
    """
    where = f"{model}: its chat template"
    by_system: dict[str | None, Record] = {}
    for record in records:
        if len(by_system) < _MAX_PROMPTS:
            by_system.setdefault(record.system, record)
    for record in by_system.values():
        messages = prompt_messages(record, system_prompt)
        text = _one_spaced(render_chat(tokenizer, messages))
        for message in messages:
            _check_message(tokenizer, message, text, record, where)
        opened = _open_thought(text, _one_spaced(messages[-1]["content"]))
        if opened is not None and not allow_open_thinking:
            raise ConfigError(
                f"{where} ends the prompt inside an open {opened}, but a response must begin with its confidence; "
                f"disable thinking ({keys.variables}={{enable_thinking: false}}), or remove {opened} from the template "
                f"(docs/training.md), or set {keys.allow_open_thinking}=true"
            )
        if reads_clock(tokenizer, messages):
            raise ConfigError(
                f"{where} puts today's date into the prompt (strftime_now), which changes when a run is resumed on "
                f"another day; {keys.day}"
            )


def _check_message(tokenizer: Any, message: Mapping[str, str], text: str, record: Record, where: str) -> None:
    if _one_spaced(message["content"]) in text:
        return
    remedy = "choose a model whose chat template renders user messages"
    if message["role"] == "system":
        if NO_SYSTEM_PROMPT in str(getattr(tokenizer, "chat_template", "")):
            return
        remedy = (
            "put it before the first user message in the template (see docs/training.md), or mark a template that "
            f"omits it on purpose by the comment {NO_SYSTEM_PROMPT}"
        )
    raise ConfigError(
        f"{where} omits the {message['role']} message of record {record.id!r} of {record.dataset}: expected "
        f"{message['content'][:60]!r}... in the prompt, found {text[:120]!r}...; {remedy}"
    )


def _open_thought(text: str, last_message: str) -> str | None:
    """The tag of the thought in which a prompt ends; tags within the messages are ignored."""
    tail = text[text.rfind(last_message) + len(last_message) :] if last_message in text else text
    tags = list(_THOUGHT_TAG.finditer(tail))
    if not tags:
        return None
    name = tags[-1]["name"].lower()
    closes = name.startswith(("/", "end", "no")) or name.endswith("_end")
    return None if closes else tags[-1][0]


def _one_spaced(text: str) -> str:
    """Collapse white space, which templates may change."""
    return " ".join(text.split())
