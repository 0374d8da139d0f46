"""From records to chat messages and token ids; variables, date and checks of a chat template."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import CATEGORY_INSTRUCTIONS, END_THINK_TAG, OPEN_TAG, THINK_TAG
from coca_mindspeed.config.prompt_form import PromptForm, instruction_text, join_system
from coca_mindspeed.data.records import Record, RecordError
from coca_mindspeed.errors import ConfigError, DataError, Problem, raise_problems
from coca_mindspeed.utils.json_files import LONE_SURROGATE

_BATCH = 1024  # prompts per call of a fast tokenizer, which distributes them over the CPUs


def instruction_suffix(record: Record, form: PromptForm | None = None) -> str:
    """Return the text after the question: ``metadata["instruction"]`` if set, else the category's.

    That is the one of ``form``, if it has one, else the default.  An instruction that does not begin with white space
    follows the question after one space, as in the paper.
    """
    trained = None if form is None else form.instructions.get(record.category)
    default = CATEGORY_INSTRUCTIONS.get(record.category, "") if trained is None else trained
    return instruction_text(str(record.metadata.get("instruction", default)))


def prompt_messages(record: Record, system_prompt: str | None, form: PromptForm | None = None) -> list[dict[str, str]]:
    """Return the chat messages of a record.

    ``system_prompt``, which asks for the confidence, stands before the record's own ``system``, as the router puts it
    before a client's; a ``system`` that already contains it is taken as it is.  Both None: no system message.  ``form``
    is as in :func:`instruction_suffix`.

    Raises RecordError: ``system`` describes another response format.
    """
    system = _system_message(record, system_prompt)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": record.question + instruction_suffix(record, form)}]


def _system_message(record: Record, system_prompt: str | None) -> str | None:
    joined = join_system(system_prompt, record.system)
    if record.system and system_prompt and OPEN_TAG in record.system and joined not in (record.system, system_prompt):
        raise RecordError(
            record,
            f"its system prompt asks for {OPEN_TAG} in other words than the method's: {record.system!r:.80}; remove "
            f"that part, since the method's prompt is put before it, or use the method's words: {system_prompt!r}",
        )
    return joined


def form_of(records: Iterable[Record], method: MethodSettings, template_variables: Mapping[str, Any]) -> PromptForm:
    """Return the form of the prompts of ``records`` in a training by ``method``.

    A system message that all records share belongs to the form, as does an instruction that all of a category share.

    Raises RecordError: as :func:`prompt_messages`.
    """
    systems: set[str | None] = set()
    instructions: dict[str, set[str]] = {}
    for record in records:
        systems.add(_system_message(record, method.system_prompt))
        instructions.setdefault(record.category, set()).add(instruction_suffix(record))
    return PromptForm(
        system_prompt=systems.pop() if len(systems) == 1 else method.system_prompt,
        instructions={name: next(iter(texts)) if len(texts) == 1 else None for name, texts in instructions.items()},
        template_variables=dict(template_variables),
        decimals=method.confidence_decimals,
        thinking=method.thinking,
    )


def form_digest(record: Record, system_prompt: str | None, form: PromptForm) -> str:
    """Identify the form of a record's prompt (:meth:`.PromptForm.digest`), by which predictions name it.

    ``system_prompt`` is the method's; an instruction that differs within a category of ``form`` belongs to the
    question.
    """
    differs = form.instructions.get(record.category, "") is None
    instruction = None if differs else instruction_suffix(record, form)
    system = _system_message(record, system_prompt)
    return form.model_copy(update={"system_prompt": system}).digest(instruction)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
    """Render a chat to text, special tokens included, up to the beginning of the response.

    Raises ConfigError if the template cannot render it, or refuses a system message.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **variables
        )
    except jinja2.TemplateError as error:
        raise ConfigError(_template_problem(tokenizer, messages, error)) from error
    return text


def render_prompts(tokenizer: Any, records: Sequence[Record], system_prompt: str | None) -> list[str]:
    """Each record's prompt as text, special tokens included.

    Raises:
        ConfigError: the chat template cannot render a record.
        DataError: a prompt contains a lone surrogate.
    """
    rendered = [render_chat(tokenizer, prompt_messages(record, system_prompt)) for record in records]
    for record, text in zip(records, rendered, strict=True):
        if found := LONE_SURROGATE.search(text):
            raise DataError(
                f"{record.name}: its prompt holds {found[0]!a}, a lone surrogate, which no "
                "tokenizer accepts; correct the text"
            )
    return rendered


def encode_prompts(tokenizer: Any, records: Sequence[Record], system_prompt: str | None) -> list[list[int]]:
    """Token ids of each record's prompt; lengths are checked before a run.

    Raises ConfigError and DataError as :func:`render_prompts`.
    """
    rendered = render_prompts(tokenizer, records, system_prompt)
    # The template writes the special tokens itself.
    prompts: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return prompts


def _template_problem(tokenizer: Any, messages: Sequence[Mapping[str, str]], error: Exception) -> str:
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    without_system = [message for message in messages if message["role"] != "system"]
    try:
        tokenizer.apply_chat_template(without_system, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError:
        return f"{where} cannot render a prompt: {error}"
    return (
        f"{where} refuses the method's system message ({error}); put its text before the first user message in the "
        "template (see docs/troubleshooting.md), so that training and serving render the same prompt"
    )


def bounded_prompt_tokens(
    tokenizer: Any, records: Sequence[Record], system_prompt: str | None, max_tokens: int, key: str
) -> Iterator[list[int]]:
    """Yield the token ids of the records' prompts; a prompt is never truncated.

    ``key`` names the setting of ``max_tokens`` in messages.

    Raises DataError: a prompt is longer than ``max_tokens``.
    """
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        for record, ids in zip(batch, encode_prompts(tokenizer, batch, system_prompt), strict=True):
            if len(ids) > max_tokens:
                raise DataError(
                    f"{record.name} has a prompt of {len(ids)} tokens, {key} is {max_tokens}; raise it or remove the "
                    "record"
                )
            yield ids


#: Comment of a template that omits the system prompt on purpose.
NO_SYSTEM_PROMPT = "{#- no system prompt -#}"
_DIRECTIVES = (*(f"%-{x}" for x in "dmHIMSj"), "%e", *(f"%{x}" for x in "aAbBcdDfFHIjmMpSTuUVwWxXyYzZ"))
# <think>, </think>, [THINK], <seed:think>, <|START_THINKING|>, <|end_of_thought|>, <reasoning>
_THOUGHT_TAG = re.compile(r"[<\[]\|?(?P<name>/?[\w:]*(?:think|thought|reason)\w*)\|?[>\]]", re.IGNORECASE)
_CLOCK_READ = "the template reads the clock"
# A macro: transformers 5 turns a function given as a variable into text.
_REFUSED_CLOCK = f"{{% macro strftime_now(format) %}}{{{{ raise_exception({_CLOCK_READ!r}) }}}}{{% endmacro %}}"
_MAX_PROMPTS = 1000  # rendered for the checks


def no_chat_template(key: str, path: object) -> Problem:
    """The problem of a model in ``path``, named by ``key``, whose tokenizer has no chat template."""
    reason = "its tokenizer has no chat template, as that of a base model"
    fix = (
        "use the model's instruct version, or write a chat_template.jinja into its directory "
        "(docs/troubleshooting.md, the chat template is refused)"
    )
    return Problem("no-chat-template", key, path, reason, fix)


def write_into_template(tokenizer: Any, variables: Mapping[str, Any], day: date | None = None) -> None:
    """Write values of variables, and the date that ``strftime_now`` returns, into the tokenizer's chat template.

    The template is saved with the tokenizer, so that a server renders the prompts of training.  A value passed to
    ``apply_chat_template`` takes precedence.  ``variables`` are JSON values, such as ``enable_thinking: False``;
    ``day`` None leaves the clock's date.

    Raises ConfigError: the template does not use a variable, or there is none.
    """
    templates = tokenizer.chat_template
    if templates is None:
        raise_problems([no_chat_template("tokenizer", tokenizer.name_or_path)])
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
    thinking: str
    day: str


#: The keys of our own run configuration.
TEMPLATE_KEYS = TemplateKeys("model.chat_template_kwargs", "method.thinking", "set model.prompt_date=YYYY-MM-DD")


def check_template(
    tokenizer: Any,
    records: Sequence[Record],
    system_prompt: str | None,
    model: str,
    keys: TemplateKeys,
    *,
    thinking: bool | None = False,
) -> None:
    """Check the rendered prompt of one record for each distinct system prompt.

    The run's variables and date are in the tokenizer's template; ``model`` (option and directory) and ``keys`` are for
    messages.  ``thinking`` is the method's; None accepts any thought.

    Raises:
        ConfigError: a message is missing in the prompt, or the prompt depends on the clock, or its thought is not as
            :func:`check_end` and :func:`check_marks` expect it.
        RecordError: as :func:`prompt_messages`.
    """
    by_system: dict[str | None, Record] = {}
    for record in records:
        if len(by_system) < _MAX_PROMPTS:
            by_system.setdefault(record.system, record)
    for record in by_system.values():
        messages, of = prompt_messages(record, system_prompt), record.name
        check_chat(tokenizer, messages, of, model, keys, thinking=thinking)


def check_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    of: str,
    model: str,
    keys: TemplateKeys,
    *,
    thinking: bool | None = False,
) -> None:
    """Check the rendered prompt of one chat; ``of`` says whose it is, the rest is as in :func:`check_template`."""
    where = f"{model}: its chat template"
    text = _one_spaced(render_chat(tokenizer, messages))
    for message in messages:
        _check_message(tokenizer, message, text, of, where)
    if thinking is not None:
        check_marks(tokenizer, where, thinking)
        end = _end(text, messages)
        check_end(end, where, keys, thinking)
        disabled = _last_thought(_end(render_chat(tokenizer, messages, **_WITHOUT_THINKING), messages))
        if not thinking and _last_thought(end) is None and disabled is not None and _closes(disabled):
            raise ConfigError(
                f"{where} lets the model think by default, but a response must begin with its confidence; disable "
                f"thinking ({keys.variables}={{enable_thinking: false}}, or the template's own variable), or set "
                f"{keys.thinking}=true"
            )
    if reads_clock(tokenizer, messages):
        raise ConfigError(
            f"{where} puts today's date into the prompt (strftime_now), which changes when a run is resumed on "
            f"another day; {keys.day}"
        )


def check_end(end: str, where: str, keys: TemplateKeys, thinking: bool) -> None:
    """Raise ConfigError if the ``end`` of a prompt, behind its last message, does not fit ``thinking``.

    Without thinking, it may not be inside an open thought; with it, it may be inside ``<think>``, and may not end with
    a closed thought.  ``where`` says what has written it.
    """
    if (tag := _last_thought(end)) is None:
        return
    if not thinking and not _closes(tag):
        raise ConfigError(
            f"{where} ends the prompt inside an open {tag[0]}, but a response must begin with its confidence; "
            f"disable thinking ({keys.variables}={{enable_thinking: false}}), or remove {tag[0]} from the template "
            f"(docs/troubleshooting.md), or set {keys.thinking}=true"
        )
    if thinking and _closes(tag):
        raise ConfigError(
            f"{where} ends the prompt with a thought that {tag[0]} closes, but {keys.thinking}=true lets the model "
            f"think; enable thinking ({keys.variables}={{enable_thinking: true}}), or set {keys.thinking}=false"
        )
    if thinking and tag[0] != THINK_TAG:
        raise ConfigError(
            f"{where} opens a thought by {tag[0]}; expected {THINK_TAG}, since {keys.thinking}=true reads the answer "
            f"behind {END_THINK_TAG}; disable thinking, or choose a model that thinks in these tags"
        )


_WITHOUT_THINKING = {"enable_thinking": False, "thinking": False}  # variables of published templates
_CHANNEL = "<|channel|>"  # gpt-oss writes thought and answer behind it, whatever the template's variables
_THOUGHT_CHANNEL = "<|channel>"  # Gemma 4 writes thoughts behind it, where it thinks


def check_marks(tokenizer: Any, where: str, thinking: bool) -> None:
    """Raise ConfigError if a special token, which has no text, separates the thought from the answer."""
    templates = tokenizer.chat_template
    source = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    marks = {mark for mark in (_CHANNEL, _THOUGHT_CHANNEL)[: 1 + thinking] if mark in source}
    if thinking:
        marks |= {THINK_TAG, END_THINK_TAG, *(tag[0] for tag in _THOUGHT_TAG.finditer(source))}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if hidden := sorted(marks & special):
        raise ConfigError(
            f"{where}: the model marks its thoughts by {', '.join(hidden)}, special tokens that leave no text, so that "
            "neither a confidence nor an answer can be read; choose a model whose tags are text, such as <think>"
        )


def opens_thought(tokenizer: Any, record: Record, system_prompt: str | None) -> bool:
    """Whether a record's prompt ends inside an open thought."""
    messages = prompt_messages(record, system_prompt)
    tag = _last_thought(_end(render_chat(tokenizer, messages), messages))
    return tag is not None and not _closes(tag)


def _end(text: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The end of a rendered prompt, behind its last message, with single spaces."""
    text, last = _one_spaced(text), _one_spaced(messages[-1]["content"])
    return text.rpartition(last)[2] if last else text


def _check_message(tokenizer: Any, message: Mapping[str, str], text: str, of: str, where: str) -> None:
    if _one_spaced(message["content"]) in text:
        return
    remedy = "choose a model whose chat template renders user messages"
    if message["role"] == "system":
        if NO_SYSTEM_PROMPT in str(getattr(tokenizer, "chat_template", "")):
            return
        remedy = (
            "put it before the first user message in the template (see docs/troubleshooting.md), or mark a template "
            f"that omits it on purpose by the comment {NO_SYSTEM_PROMPT}"
        )
    raise ConfigError(
        f"{where} omits the {message['role']} message of {of}: expected "
        f"{message['content'][:60]!r}... in the prompt, found {text[:120]!r}...; {remedy}"
    )


def _last_thought(end: str) -> re.Match[str] | None:
    """The last tag of a thought in a text."""
    tags = list(_THOUGHT_TAG.finditer(end))
    return tags[-1] if tags else None


def _closes(tag: re.Match[str]) -> bool:
    name = tag["name"].lower()
    return name.startswith(("/", "end", "no")) or name.endswith("_end")


def _one_spaced(text: str) -> str:
    """Collapse white space, which templates may change."""
    return " ".join(text.split())
