"""``coca-mindspeed ask``: a model's confidence and answer for each question, from a directory, the hub or a server."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from coca_mindspeed.algorithm.methods import METHODS, MethodSettings
from coca_mindspeed.cli.options import above, at_least, device_name, template_variables
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig, RunConfig
from coca_mindspeed.config.values import checked_method
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import CocaError, ConfigError, UsageError, validation_problems
from coca_mindspeed.local.run_directory import BEST_MODEL
from coca_mindspeed.utils.console import one_line, print_text, without_password
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import is_ours, model_of
from coca_mindspeed.utils.files import is_hub_id
from coca_mindspeed.utils.json_files import read_object, to_json_line
from coca_mindspeed.utils.packages import require

if TYPE_CHECKING:
    from coca_mindspeed.local.policy import Policy

#: File of an exported model with the method and the instruction that it was trained with.
PROMPT_FILE = "coca_prompt.json"


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
    category = "its instruction follows the question (default: that of the run's questions, or factual)"
    option("--category", choices=("math", "code", "factual"), help=category)
    option("--instruction", metavar="TEXT", help="follows each question instead; '' for none")
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
        path, config, instruction = _model(arguments)
        from coca_mindspeed.local.load import load_policy  # torch takes seconds to import
        from coca_mindspeed.local.policy import choose_device

        records = [_record(each, instruction) for each in questions]
        _check_context(path, config, records)
        print_text(f"loading {path}", sys.stderr)
        policy = load_policy(path, config.model, choose_device(arguments.device, where="--device"), where="MODEL")
        replies = ask(policy, config, records, arguments.samples)
        missing = (
            "train it first, with a format warm-up: coca-mindspeed train laptop model.path=DIR ... (docs/quickstart.md)"
        )
    valid = sum(reply.confidence is not None for reply in replies)
    for reply in replies:
        print_text(to_json_line(reply._asdict()).rstrip("\n") if arguments.json else reply.line)
    if 2 * valid < len(replies):
        print_text(
            f"[no-format] {valid} of {len(replies)} sampled responses state a valid confidence, expected at least "
            f"half; {missing}",
            sys.stderr,
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


def _check_context(path: Path, config: RunConfig, records: Sequence[Record]) -> None:
    """Refuse prompts that do not fit, with the longest response, into the context of the model in ``path``."""
    from coca_mindspeed.local.model_files import load_model_tokenizer, read_model_config
    from coca_mindspeed.local.validation import LengthLimits, check_lengths

    system_prompt = config.method.training_method.system_prompt
    tokenizer = load_model_tokenizer(path, config.model, where="MODEL")
    architecture = read_model_config(path, config.model, where="MODEL")
    limits = LengthLimits(sys.maxsize, config.rollout.max_new_tokens, "QUESTION", "--max-tokens")
    check_lengths(tokenizer, architecture, records, system_prompt, limits, f"MODEL={path}", show_progress=False)


def ask(policy: "Policy", config: RunConfig, records: Sequence[Record], samples: int) -> list[Reply]:
    """Sample ``samples`` responses to each record and read their confidences."""
    from coca_mindspeed.local.respond import respond
    from coca_mindspeed.local.schedule import generator
    from coca_mindspeed.scoring.rollout import number_or_none

    draw = generator(policy.device, config.seed, "ask")
    rollout = respond(policy, records, config.method, config.rollout, draw, samples)
    parsed = rollout.read(policy.text, config.method.parser(), config.method.max_confidence_tokens)
    stated = map(number_or_none, parsed.stated)
    asked = [record.question for record in records for _ in range(samples)]
    rows = zip(asked, stated, parsed.answers, parsed.texts, strict=True)
    return [Reply(question, confidence, answer.strip(), text) for question, confidence, answer, text in rows]


def _typed_instruction(arguments: argparse.Namespace) -> dict[str, str]:
    given = {"category": arguments.category, "instruction": arguments.instruction}
    return {name: value for name, value in given.items() if value is not None}


def _record(question: str, instruction: Mapping[str, Any]) -> Record:
    category, metadata = instruction.get("category", "factual"), {}
    if instruction.get("instruction") is not None:
        metadata["instruction"] = instruction["instruction"]
    return Record("asked", "asked", category, question, "", metadata=metadata)


def _model(arguments: argparse.Namespace) -> tuple[Path, RunConfig, Mapping[str, Any]]:
    """Directory, configuration and instruction of a model, by the run or the export that it belongs to, if any."""
    path = Path(arguments.model)
    if is_hub_id(arguments.model) and not path.exists():
        from coca_mindspeed.local.model_files import download_model

        path = download_model(arguments.model, custom_code=arguments.trust_remote_code, show_progress=True)
    path = model_of(path)
    if not (path / "config.json").is_file():
        found = "one without config.json" if path.is_dir() else "a file" if path.exists() else "nothing there"
        expected = "a run directory that holds model/, a Hugging Face directory or ORG/NAME of the hub"
        raise ConfigError(f"{arguments.model}: expected {expected}, found {found}")
    known: Mapping[str, Any] = {}
    config = compose_run("local", ["model.path=unknown", "data.train=unknown", "rollout.max_new_tokens=512"]).run
    if path.name in ("model", BEST_MODEL) and is_ours(path.parent, "run"):
        config = compose_run(str(path.parent / "config.yaml")).run
        if not arguments.trust_remote_code:
            refuse_code(path.parent, config, uses_method=arguments.method is None)
        known = prompt_of(config)
    elif (path / PROMPT_FILE).is_file():
        known = _read_prompt(path / PROMPT_FILE)
        config = _with_method(config, known["method"])
    limit = arguments.max_tokens or known.get("max_new_tokens", config.rollout.max_new_tokens)
    rollout: dict[str, Any] = {"temperature": arguments.temperature, "max_new_tokens": limit}
    changes = _typed_instruction(arguments)
    if "category" in changes:
        known = {}
    if arguments.method is not None:
        config = _with_method(config, {"name": arguments.method})
    model = ModelConfig(
        path=str(path),
        compute_dtype=config.model.compute_dtype,
        chat_template_kwargs=arguments.chat_template_kwargs or config.model.chat_template_kwargs,
        prompt_date=config.model.prompt_date,
        attention=config.model.attention,
        trust_remote_code=arguments.trust_remote_code,
    )
    updated = {
        "model": model,
        "rollout": config.rollout.model_copy(update=rollout),
        "seed": arguments.seed,
    }
    return path, config.model_copy(update=updated), {**known, **changes}


def refuse_code(directory: Path, config: RunConfig, *, uses_method: bool) -> None:
    """Raise ConfigError if the run in ``directory``, which anyone may have written, names Python code to run."""
    named = [config.method.name] if uses_method and is_custom(config.method.name) else []
    named += ["model.trust_remote_code=true"] if config.model.trust_remote_code else []
    if named:
        raise ConfigError(
            f"{directory / 'config.yaml'}: names Python code of its own ({', '.join(named)}); add --trust-remote-code "
            "if you trust whoever wrote it"
        )


def _with_method(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    common = {field.name: getattr(config.method, field.name) for field in fields(MethodSettings)}
    return config.model_copy(update={"method": checked_method({**common, **changes})})


def _read_prompt(file: Path) -> dict[str, Any]:
    """The content of :data:`PROMPT_FILE`; a file from elsewhere names one of our methods, and never code."""
    known = read_object(file)
    method, limit = known.get("method"), known.get("max_new_tokens")
    if not isinstance(method, dict) or method.get("name") not in METHODS or type(limit) is not int or limit < 1:
        expected = f"a method of ours ({', '.join(METHODS)}) and max_new_tokens from 1"
        raise ConfigError(f"{file}: expected {expected}, found {known!r:.200}; remove the file, and give --method")
    try:
        checked_method(method)
    except ValidationError as error:
        raise ConfigError(f"{file}: {validation_problems(error)[0]}; remove the file, and give --method") from error
    return known


def prompt_of(config: RunConfig) -> dict[str, Any]:
    """Return the prompt of a run's model and the format of its responses: the content of :data:`PROMPT_FILE`.

    Category and instruction are those of the first training question; without its file they are left out.
    """
    from coca_mindspeed.local.validation import load_data

    method = {name: getattr(config.method, name) for name in ("name", "confidence_decimals", "max_confidence_tokens")}
    known = {"method": method, "max_new_tokens": config.rollout.max_new_tokens}
    small = config.data.model_copy(update={"train_size": 1, "evaluate": None, "evaluate_size": 1})
    try:
        first = load_data(small)[0][0]
    except CocaError:  # the file is gone, or a package that reads it is not installed
        return known
    return {**known, "category": first.category, "instruction": first.metadata.get("instruction")}


def _ask_server(arguments: argparse.Namespace, questions: Sequence[str]) -> list[Reply]:
    require("openai", "tenacity", purpose="ask URL")
    from coca_mindspeed.algorithm.parsing import ResponseParser
    from coca_mindspeed.utils.chat_client import ChatClient, ChatError

    method = METHODS[arguments.method or "coca"]
    instruction = _typed_instruction(arguments)
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
                messages = prompt_messages(_record(question, instruction), method.system_prompt)
                request = {"model": name, "messages": messages, "seed": arguments.seed + sample, **options}
                return question, (await client.complete(request)).text

            return await asyncio.gather(*(one(q, s) for q in questions for s in range(arguments.samples)))
        except ChatError as error:
            raise ConfigError(f"{without_password(arguments.model)}: {error}") from error
        finally:
            await client.close()

    parse = ResponseParser(method.confidence_position)
    found = [(question, text, parse(text)) for question, text in asyncio.run(ask_all())]
    return [Reply(question, parsed.confidence, parsed.answer.strip(), text) for question, text, parsed in found]
