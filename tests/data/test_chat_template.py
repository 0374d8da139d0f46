"""Chat templates of the kinds that published models have: what is written into them, and what they are refused for."""

import contextlib
import copy
import datetime
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from coca_mindspeed.data.prompts import (
    NO_SYSTEM_PROMPT,
    TEMPLATE_KEYS,
    check_template,
    reads_clock,
    render_chat,
    write_into_template,
)
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from tests import tokenizers_for_tests as kinds

KEYS = TEMPLATE_KEYS
SYSTEM = "State your confidence\n\nfirst, in <confidence> tags."
RECORD = Record("1", "d", "math", "1+1?", "2")
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "1+1?"}]
DAY = datetime.date(2024, 7, 5)

LOOP = "{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{%- endfor %}"
GENERATION = "{%- if add_generation_prompt %}<|assistant|>\n{%- endif %}"
# As Qwen 3 turns thinking off, DeepSeek-R1-Distill begins it, and Llama 3.1 and SmolLM3 name today.
QWEN3 = (
    LOOP + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
R1 = LOOP + "{% if add_generation_prompt %}{{'<|assistant|><think>\\n'}}{% endif %}"
SWITCHABLE_R1 = (
    LOOP + "{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}"
    "{%- if not enable_thinking | default(true) %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
LLAMA31 = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}Today: {{ date_string }}\n\n" + LOOP + GENERATION
)
SMOLLM3 = (
    '{%- macro header(name) -%}{%- set today = strftime_now("%-d %B %Y, %A") -%}{{ name }}: {{ today }}{%- endmacro -%}'
    "{{ header('Date') }}\n" + LOOP + GENERATION
)


def tokenizer(template):
    made = copy.deepcopy(kinds.qwen_like())
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": True}),
        (SWITCHABLE_R1, {"enable_thinking": False}),
        (LLAMA31, {"date_string": "1 Jan 2025"}),
        (
            "{{ a }}|{{ b.c[0] }}|{{ d is none }}" + LOOP,
            {"a": "q\"'{{ % }}\n🙂é%}", "b": {"c": [1.5, None]}, "d": None},
        ),
        (
            "{%- macro inner() %}{{ a }}{% endmacro %}" + LOOP + "{% for x in [1] %}{{ a }}{% endfor %}{{ inner() }}",
            {"a": 7},
        ),
        ("\n  {% if a %}x{% endif %}\n" + LOOP, {"a": True}),
    ],
)
def test_a_written_template_renders_as_with_the_variables_given(template, variables):
    plain, written = tokenizer(template), tokenizer(template)
    write_into_template(written, variables)
    expected = render_chat(plain, CHAT, **variables)
    assert render_chat(written, CHAT) == expected
    write_into_template(written, variables)  # a checkpoint's template, which has them already
    assert render_chat(written, CHAT) == expected
    assert written.chat_template.count(" is not defined %}{% set") == len(variables)


@pytest.mark.parametrize(("template", "clock"), [(QWEN3, False), (LLAMA31, True), (SMOLLM3, True)])
def test_the_clock_is_found_and_replaced_by_a_day(template, clock, monkeypatch):
    made = tokenizer(template)
    assert reads_clock(made, CHAT) == clock
    if not clock:
        write_into_template(made, {}, DAY)
        assert made.chat_template == template
        with pytest.raises(ConfigError, match="'enable_thinkin'"):
            write_into_template(made, {"enable_thinkin": False})
        return
    with monkeypatch.context() as patched:
        patched.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DAY))
        expected = render_chat(made, CHAT)
    assert render_chat(made, CHAT) != expected
    write_into_template(made, {}, DAY)
    assert render_chat(made, CHAT) == expected
    assert not reads_clock(made, CHAT)
    check_template(made, [RECORD], SYSTEM, "model.path=DIR", KEYS)


@pytest.mark.parametrize(
    "format_", ["%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%-d %B %Y", "%A, %e %b %y", "%d/%m/%Y %H:%M:%S", "%j %p %I"]
)
def test_a_day_is_written_as_strftime_does(format_):
    made = tokenizer(f"{{{{ strftime_now('{format_}') }}}}")
    write_into_template(made, {}, DAY)
    assert render_chat(made, CHAT) == DAY.strftime(format_)


FALCON = "{% for m in messages %}{{ m.content.replace('\\n\\n', '\\n') | trim }}\n{% endfor %}"
DROPS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOP + GENERATION, None),
        (FALCON, None),
        (NO_SYSTEM_PROMPT + DROPS, None),
        (DROPS, "system message"),
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}", "user message"),
        (R1, "<think>"),
        (SWITCHABLE_R1, "<think>"),
        (QWEN3, "method.thinking"),
        (LOOP + "[THINK]", "[THINK]"),
        (LOOP + "<seed:think>\n", "<seed:think>"),
        (LOOP + "<|START_THINKING|>", "<|START_THINKING|>"),
        (LOOP + "<|START_THINKING|><|END_THINKING|>", None),
        (LOOP + "<|begin_of_thought|>x<|end_of_thought|>", None),
        (LOOP + "<|assistant|></think>", None),
        (LLAMA31, "date"),
    ],
)
def test_what_a_template_is_refused_for(template, says):
    if says is None:
        check_template(tokenizer(template), [RECORD], SYSTEM, "model.path=DIR", KEYS)
        return
    with pytest.raises(ConfigError) as refusal:
        check_template(tokenizer(template), [RECORD], SYSTEM, "model.path=DIR", KEYS)
    assert says in str(refusal.value)
    assert "model.path=DIR" in str(refusal.value)


GLM = LOOP + "<|assistant|>{%- if enable_thinking is defined and not enable_thinking %}\n<think></think>{%- endif %}"
QWEN35 = (
    LOOP + "<|im_start|>assistant\n{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}"
)
SMALL_QWEN35 = (
    LOOP + "<|im_start|>assistant\n{%- if enable_thinking is defined and enable_thinking %}"
    "{{- '<think>\n' }}{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
DEEPSEEK31 = LOOP + "<|Assistant|>{%- if thinking is defined and thinking %}<think>{%- else %}</think>{%- endif %}"
GPT_OSS = LOOP + "{#- <|channel|>analysis<|message|> -#}<|start|>assistant"
MAGISTRAL = "{#- [THINK] -#}" + LOOP
GEMMA4 = LOOP + "{#- <|channel>thought -#}<|turn>model\n"
NEMOTRON3 = LOOP + (
    "{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}<|im_start|>assistant\n<think>"
    "{%- if enable_thinking %}{{- '\n' }}{%- else %}{{- '</think>' }}{%- endif %}"
)
SPECIAL = ["<|channel|>", "<|channel>", "[THINK]"]


@pytest.mark.parametrize(
    ("template", "variables", "without", "with_thinking"),
    [
        (QWEN3, {}, False, True),
        (QWEN3, {"enable_thinking": False}, True, False),
        (QWEN3, {"enable_thinking": True}, False, True),
        (GLM, {}, False, True),
        (GLM, {"enable_thinking": False}, True, False),
        (QWEN35, {}, False, True),
        (QWEN35, {"enable_thinking": False}, True, False),
        (SMALL_QWEN35, {}, True, False),
        (SMALL_QWEN35, {"enable_thinking": True}, False, True),
        (DEEPSEEK31, {}, True, False),
        (DEEPSEEK31, {"thinking": True}, False, True),
        (R1, {}, False, True),
        (LOOP + GENERATION, {}, True, True),
        (LOOP + "<seed:think>", {}, False, False),
        (GPT_OSS, {}, False, False),
        (MAGISTRAL, {}, True, False),
        (GEMMA4, {}, True, False),
        (NEMOTRON3, {}, False, True),
        (NEMOTRON3, {"enable_thinking": False}, True, False),
    ],
)
def test_the_end_of_a_prompt_fits_the_methods_thinking(template, variables, without, with_thinking):
    check_ends(template, variables, without, with_thinking)


def check_ends(template, variables, without, with_thinking):
    """Check which of ``method.thinking`` accepts a template."""
    made = tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    write_into_template(made, variables, DAY)
    for thinking, accepted in ((False, without), (True, with_thinking), (None, True)):
        with contextlib.nullcontext() if accepted else pytest.raises(ConfigError, match=r"model\.path=DIR"):
            check_template(made, [RECORD], SYSTEM, "model.path=DIR", KEYS, thinking=thinking)


_OFF = {"enable_thinking": False}
#: Checkout and template -> variables, and whether training without and with thinking accept it.
PUBLISHED = [
    ("TRL_HOME", "qwen3", {}, False, True),
    ("TRL_HOME", "qwen3", _OFF, True, False),
    ("TRL_HOME", "qwen3_instruct_2507", {}, True, True),
    ("TRL_HOME", "qwen3_5_think", {}, False, True),
    ("TRL_HOME", "qwen3_5_think", _OFF, True, False),
    ("TRL_HOME", "qwen3_5_nothink", {}, True, False),
    ("TRL_HOME", "qwen3_5_nothink", {"enable_thinking": True}, False, True),
    ("TRL_HOME", "qwen3_6", {}, False, True),
    ("TRL_HOME", "glm4moe", {}, False, True),
    ("TRL_HOME", "glm4moe", _OFF, True, False),
    ("TRL_HOME", "nemotron_3_nano", {}, False, True),
    ("TRL_HOME", "nemotron_3_nano", _OFF, True, False),
    ("TRL_HOME", "deepseekv3", {}, False, True),
    ("TRL_HOME", "gptoss", {}, False, False),
    ("TRL_HOME", "diffusion_gemma", {}, True, False),
    ("LLAMA_CPP_HOME", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", {}, False, True),
    ("LLAMA_CPP_HOME", "deepseek-ai-DeepSeek-V3.1", {}, True, False),
    ("LLAMA_CPP_HOME", "deepseek-ai-DeepSeek-V3.1", {"thinking": True}, False, True),
]
_FOLDERS = {"TRL_HOME": "trl/chat_templates", "LLAMA_CPP_HOME": "models/templates"}


@pytest.mark.published
@pytest.mark.parametrize(("variable", "name", "variables", "without", "with_thinking"), PUBLISHED)
def test_published_templates(variable, name, variables, without, with_thinking):
    if variable not in os.environ:
        pytest.skip(f"needs a checkout: {variable} not set (docs/installation.md)")
    file = Path(os.environ[variable]) / _FOLDERS[variable] / f"{name}.jinja"
    check_ends(file.read_text(encoding="utf-8"), variables, without, with_thinking)


@pytest.mark.parametrize("special", [False, True])
def test_tags_without_text_are_refused_by_name(special):
    made = tokenizer(LOOP + "<think>")
    made.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    with pytest.raises(ConfigError, match="</think>, <think>") if special else contextlib.nullcontext():
        check_template(made, [RECORD], SYSTEM, "model.path=DIR", KEYS, thinking=True)


@pytest.mark.parametrize("where", ["system", "question"])
def test_a_tag_within_a_message_opens_no_thought(where):
    system = f"Write <think> first. {SYSTEM}" if where == "system" else SYSTEM
    record = Record("1", "d", "factual", "What does <think> mean?", "x") if where == "question" else RECORD
    check_template(tokenizer(LOOP + GENERATION), [record], system, "model.path=DIR", KEYS)
