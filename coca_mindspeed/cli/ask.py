"""``coca-mindspeed ask``: a model's confidence and answer for each question, from a directory, the hub or a server."""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coca_mindspeed.algorithm.methods import METHODS, MethodSettings, method_settings
from coca_mindspeed.algorithm.parsing import CATEGORY_INSTRUCTIONS
from coca_mindspeed.cli.local_model import local_model
from coca_mindspeed.cli.options import THINKING_HELP, above, at_least, device_name, template_variables
from coca_mindspeed.cli.trained_prompt import FORM_HELP, require_trained_prompt
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import CATEGORIES, Record
from coca_mindspeed.errors import ConfigError, UsageError, did_you_mean
from coca_mindspeed.utils.console import one_line, print_note, print_text, without_password
from coca_mindspeed.utils.json_files import to_json_line
from coca_mindspeed.utils.packages import require

if TYPE_CHECKING:
    from coca_mindspeed.local.policy import Policy


class Reply(NamedTuple):
    """A response to one question; ``confidence`` is None if the response states no valid one."""

    question: str
    confidence: float | None
    answer: str
    response: str

    @property
    def line(self) -> str:
        stated = " --  " if self.confidence is None else f"{self.confidence:.3f}"
        return f"{stated}  {one_line(self.question)}  {one_line(self.answer)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    where = "run directory, Hugging Face directory, id of the hub, or URL of an OpenAI-compatible server"
    option("model", metavar="MODEL", help=where)
    option("questions", nargs="+", metavar="QUESTION", help="-: lines of standard input")
    option("--samples", type=at_least(1), default=1, metavar="N", help="responses to each question (default: 1)")
    option("--json", action="store_true", help="print JSON Lines")
    option("--method", choices=tuple(METHODS), help="whose prompt is sent (default: that of the run, or coca)")
    category = "its instruction follows the question (default: the only one that was trained, or factual)"
    option("--thinking", action="store_true", default=None, help=THINKING_HELP)
    option("--category", metavar="NAME", help=category)
    option("--instruction", metavar="TEXT", help="follows each question instead; '' for none")
    option("--form", type=Path, metavar="DIR", help=f"with a URL: {FORM_HELP}")
    option("--max-tokens", type=at_least(1), metavar="N", help="longest response (default: the run's, or 512)")
    option("--temperature", type=above(0), default=1.0, metavar="T", help="of sampling (default: 1.0)")
    option("--seed", type=at_least(0), default=0, metavar="N", help="of sampling (default: 0)")
    option("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N, npu or npu:N")
    option("--name", metavar="NAME", help="of the model at URL (default: the first that the server lists)")
    variables = 'variables of the chat template, {"enable_thinking": false} for example'
    trust = "run the Python code that the model's directory names: its own method, and auto_map in config.json"
    option("--trust-remote-code", action="store_true", help=trust)
    option("--chat-template-kwargs", type=template_variables, metavar="JSON", help=variables)


def run(arguments: argparse.Namespace) -> int:
    questions = list(_questions(arguments.questions))
    if not questions:
        raise UsageError("QUESTION: standard input holds no question")
    if arguments.model.startswith(("http://", "https://")):
        replies = _ask_server(arguments, questions)
        missing = "serve a model that was trained to state its confidence, or read the field `coca` of a coca-router"
    else:
        if arguments.form is not None:
            raise UsageError("--form: is for a URL; MODEL's own is used")
        path, config, trained = local_model(arguments.model, arguments)
        prompt = _prompt(arguments, trained, config.method)
        from coca_mindspeed.local.load import load_policy  # torch takes seconds to import
        from coca_mindspeed.local.policy import choose_device

        if not (questions := _readable(path, config, questions)):
            return 1
        records = [prompt.record(question) for question in questions]
        _check_context(path, config, records, prompt.system_prompt)
        print_note(f"loading {path}")
        policy = load_policy(path, config.model, choose_device(arguments.device, where="--device"), where="MODEL")
        replies = ask(policy, config, records, prompt.system_prompt, arguments.samples)
        missing = (
            "train it first, with a format warm-up: coca-mindspeed train laptop model.path=DIR ... (docs/quickstart.md)"
        )
    valid = sum(reply.confidence is not None for reply in replies)
    for reply in replies:
        print_text(to_json_line(reply._asdict()).rstrip("\n") if arguments.json else reply.line)
    if 2 * valid < len(replies):
        print_note(
            f"[no-format] {valid} of {len(replies)} sampled responses state a valid confidence, expected at least "
            f"half; {missing}"
        )
    return 0 if valid else 1


def _questions(given: Sequence[str]) -> Iterator[str]:
    for text in given:
        lines = (line.rstrip("\n") for line in sys.stdin) if text == "-" else [text]
        for line in lines:
            if line.strip():
                yield line
            elif text != "-":
                raise UsageError("QUESTION: expected text, found an empty one")


_ARITHMETIC = re.compile(r"[0-9]{4}[+*%][0-9]{4}")


def _readable(path: Path, config: RunConfig, questions: Sequence[str]) -> list[str]:
    """The questions that the model can read; of the others, print what it reads."""
    from coca_mindspeed.local.model_files import load_model_tokenizer

    tokenizer = load_model_tokenizer(path, config.model, where="MODEL")
    unknown = {tokenizer.pad_token_id, tokenizer.unk_token_id} - {None}  # they stand for no text
    has_words = len(tokenizer) > _FEW_TOKENS
    readable = []
    for question in questions:
        ids = tokenizer(question, add_special_tokens=False)["input_ids"]
        of_run = config.data.name == "arithmetic" and not _ARITHMETIC.fullmatch(question.strip())
        if has_words or not (unknown & {*ids} or of_run):
            readable.append(question)
            continue
        reads = "sums, products and remainders of numbers of four digits, units first: 1600+7000 is 61 + 7"
        if not of_run:
            reads = "only the characters " + "".join(sorted(name for name in tokenizer.get_vocab() if len(name) == 1))
        print_note(f"{one_line(question)}: [unreadable] the model reads {reads}")
    return readable


_FEW_TOKENS = 100  # of a tokenizer whose tokens are characters


def _check_context(path: Path, config: RunConfig, records: Sequence[Record], system_prompt: str | None) -> None:
    """Refuse prompts that do not fit, with the longest response, into the context of the model in ``path``."""
    from coca_mindspeed.local.model_files import load_model_tokenizer, read_model_config
    from coca_mindspeed.local.prompt_checks import LengthLimits, check_lengths

    tokenizer = load_model_tokenizer(path, config.model, where="MODEL")
    architecture = read_model_config(path, config.model, where="MODEL")
    limits = LengthLimits(sys.maxsize, config.rollout.max_new_tokens, "QUESTION", "--max-tokens")
    check_lengths(tokenizer, architecture, records, system_prompt, limits, f"MODEL={path}", show_progress=False)


@dataclass(frozen=True)
class _Prompt:
    """What surrounds each question."""

    system_prompt: str | None
    instruction: str

    def record(self, question: str) -> Record:
        return Record("asked", "asked", "asked", question, "", metadata={"instruction": self.instruction})


def ask(
    policy: "Policy", config: RunConfig, records: Sequence[Record], system_prompt: str | None, samples: int
) -> list[Reply]:
    """Sample ``samples`` responses to each record and read their confidences."""
    from coca_mindspeed.local.respond import respond
    from coca_mindspeed.local.schedule import generator
    from coca_mindspeed.scoring.rollout import number_or_none

    draw = generator(policy.device, config.seed, "ask")
    rollout = respond(policy, records, system_prompt, config.rollout, draw, samples)
    parsed = rollout.read(policy.text, config.method, in_training=False)
    stated = map(number_or_none, parsed.stated)
    asked = [record.question for record in records for _ in range(samples)]
    rows = zip(asked, stated, parsed.answers, parsed.texts, strict=True)
    return [Reply(question, confidence, answer.strip(), text) for question, confidence, answer, text in rows]


def _prompt(arguments: argparse.Namespace, trained: TrainedPrompt | None, method: MethodSettings) -> _Prompt:
    """The prompt of the command line, and of ``trained`` where that says nothing; ``method`` reads the responses."""
    form, category = None if trained is None else trained.form, arguments.category
    is_trained = trained is not None and trained.method in (None, method.label)
    system_prompt = form.system_prompt if form is not None and is_trained else method.system_prompt
    if arguments.instruction is not None:
        return _Prompt(system_prompt, arguments.instruction)
    if form is not None and form.instructions and (category is None or category in form.instructions):
        return _Prompt(system_prompt, form.instructions[form.category(category, key="--category")] or "")
    if category is not None and category not in CATEGORIES:
        named = {**dict.fromkeys(CATEGORIES), **(form.instructions if form else {})}
        raise UsageError(f"--category {category}: expected one of {', '.join(named)}{did_you_mean(category, named)}")
    if form is not None and form.instructions:
        trained_with = ", ".join(form.instructions)
        print_note(f"warning: --category {category}: the model was trained with {trained_with}")
    return _Prompt(system_prompt, CATEGORY_INSTRUCTIONS.get(category or "factual", ""))


def _ask_server(arguments: argparse.Namespace, questions: Sequence[str]) -> list[Reply]:
    require("openai", "tenacity", purpose="ask URL")
    from coca_mindspeed.utils.chat_client import ChatClient, ChatError, warn_of_thoughts

    trained = None if arguments.form is None else require_trained_prompt(arguments.form, "--form")
    thinking = bool(arguments.thinking or (trained and trained.form.thinking))
    method = method_settings(
        arguments.method or (trained and trained.method) or "coca",
        thinking=thinking,
        confidence_decimals=None if trained is None else trained.form.decimals,
    )
    prompt = _prompt(arguments, trained, method)
    options: dict[str, Any] = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens or 512}
    if arguments.chat_template_kwargs:
        options["extra_body"] = {"chat_template_kwargs": arguments.chat_template_kwargs}

    async def ask_all() -> list[tuple[str, str]]:
        client = ChatClient(arguments.model, os.environ.get("OPENAI_API_KEY"), retries=1)
        try:
            name = arguments.name or next(iter(await client.models() or ()), None)
            if name is None:
                raise UsageError(f"{without_password(arguments.model)}: lists no models; name one by --name")

            async def one(question: str, sample: int) -> tuple[str, str]:
                messages = prompt_messages(prompt.record(question), prompt.system_prompt)
                request = {"model": name, "messages": messages, "seed": arguments.seed + sample, **options}
                return question, (await client.complete(request)).response(thinking)

            responses = await asyncio.gather(*(one(q, s) for q in questions for s in range(arguments.samples)))
            warn_of_thoughts(client.thoughts, thinking)
            return responses
        except ChatError as error:
            raise ConfigError(f"{without_password(arguments.model)}: {error}") from error
        finally:
            await client.close()

    parse = method.parser(in_training=False)
    found = [(question, text, parse(text)) for question, text in asyncio.run(ask_all())]
    return [Reply(question, parsed.confidence, parsed.answer.strip(), text) for question, text, parsed in found]
