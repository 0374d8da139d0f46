"""``coca-mindspeed collect``: responses of a model to a file of records, which ``evaluate`` grades."""

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.algorithm.methods import method_settings, training_method
from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.cli.local_model import local_model
from coca_mindspeed.cli.options import THINKING_HELP, at_least, columns, device_name, place, template_variables, within
from coca_mindspeed.cli.trained_prompt import FORM_HELP, require_trained_prompt
from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.data.records import Record, records_digest, write_records
from coca_mindspeed.data.registry import read_records_of
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.collection import Answerer, collect_responses
from coca_mindspeed.utils.console import print_note, print_text, without_password
from coca_mindspeed.utils.files import fingerprint
from coca_mindspeed.utils.json_files import read_complete_rows, read_json_lines
from coca_mindspeed.utils.packages import require

_SERVER = {"concurrency": 16, "max_tokens": 4096}
_LOCAL_AT_ONCE = 64


class Collected(NamedTuple):
    """A file of responses, and how they are graded."""

    responses: Path
    gold: Path  # records
    method: str
    position: ConfidencePosition
    decimals: int | None
    thinking: bool
    grader: tuple[str, Mapping[str, Any]] | None  # of the run; None: unknown


class _Asked(NamedTuple):
    """A model or server to ask: the settings that its responses depend on, and the function that begins to answer."""

    settings: Mapping[str, Any]
    method: str
    position: ConfidencePosition
    form: PromptForm
    start: Callable[[], Answerer]
    grader: tuple[str, Mapping[str, Any]] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    where = (
        "URL of an OpenAI-compatible server (http://127.0.0.1:8000/v1), or a run, an export, a directory or a hub id"
    )
    option("source", metavar="URL|MODEL", help=where)
    option("--model", metavar="NAME", help="name of the model at URL")
    option("--data", type=place, required=True, metavar="FILE", help="records with the questions, as train reads them")
    option("--columns", type=columns, metavar="JSON", help="columns of --data by field, where their names differ")
    option("--output", type=place, required=True, metavar="DIR", help="for responses.jsonl; the same command resumes")
    option("--method", metavar="NAME", help="method whose prompt is sent (default: the form's, or coca)")
    option("--form", type=place, metavar="DIR", help=f"with a URL: {FORM_HELP}")
    option("--thinking", action="store_true", default=None, help=THINKING_HELP)
    option("--temperature", type=within(0, 2), default=1.0, metavar="T", help="sampling temperature (default: 1.0)")
    add_sampling_options(parser)


def add_sampling_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of sampling that ``evaluate MODEL --data`` has, too."""
    option = parser.add_argument
    option("--samples", type=at_least(1), metavar="N", help="responses to each question (default: 1)")
    option("--concurrency", type=at_least(1), metavar="N", help="at once (default: 64; 16 requests of a URL)")
    longest = "longest response (default: the run's, or 512; 4096 of a URL)"
    option("--max-tokens", type=at_least(1), metavar="N", help=longest)
    option("--seed", type=at_least(0), metavar="N", help="of a MODEL's sampling (default: 0)")
    option("--device", type=device_name, metavar="NAME", help="of a MODEL: auto (default), cpu, cuda, cuda:N, ...")
    trust = "run the Python code that MODEL's directory names"
    option("--trust-remote-code", action="store_const", const=True, help=trust)
    variables = 'variables of the chat template, {"enable_thinking": false} for example (vLLM, SGLang)'
    option("--chat-template-kwargs", type=template_variables, metavar="JSON", help=variables)


#: Their names, and those that a URL does not have.
SAMPLING = ("samples", "concurrency", "max_tokens", "seed", "device", "trust_remote_code", "chat_template_kwargs")
_LOCAL = ("seed", "device", "trust_remote_code")


def run(arguments: argparse.Namespace) -> int:
    """Ask for the responses that ``--output`` lacks, and print the command that grades them."""
    collected = collect(arguments)
    grade = ["coca-mindspeed", "evaluate", str(collected.responses), "--gold", str(collected.gold)]
    grade += ["--method", collected.method, "--output", str(arguments.output)]
    grade += [] if collected.decimals is None else ["--decimals", str(collected.decimals)]
    grade += ["--thinking"] * collected.thinking
    count = sum(1 for _ in read_json_lines(collected.responses))
    print_text(f"{count} responses: {collected.responses}; grade them: {shlex.join(grade)}")
    return 0


def collect(arguments: argparse.Namespace) -> Collected:
    """Ask for the responses that ``--output`` lacks; :class:`UsageError` for an option that the source does not have.

    Raises ConfigError or DataError if the source or the records cannot be used; the responses so far are saved.
    """
    is_server = re.match(r"[^/]*:", arguments.source) is not None and not Path(arguments.source).exists()
    _check_options(arguments, is_server)
    if is_server:
        require("openai", "tenacity", purpose="collect")
    from coca_mindspeed.utils.directories import check_directory, check_writable, claim_directory, lock_run
    from coca_mindspeed.utils.process import interruptible
    from coca_mindspeed.utils.progress import StepProgress

    output: Path = arguments.output
    records = read_records_of("--data", arguments.data, arguments.columns)
    samples = arguments.samples or 1
    asked = (_of_server if is_server else _of_model)(arguments, records)
    settings = {**asked.settings, "--samples": samples, "content of --data": records_digest(records)["sha256"]}
    check_directory(output, settings)
    check_writable(output)
    questions = {(record.id, sample): record for record in records for sample in range(samples)}
    responses = output / "responses.jsonl"
    saved = f"stopped; the responses so far are in {responses}; the same command resumes"
    with lock_run(output), interruptible(saved):
        claim_directory(output, settings)
        done = len(read_complete_rows(responses)) if responses.exists() else 0
        try:
            answer = asked.start() if done < len(questions) else _nothing
            with StepProgress(len(questions), True, done, title="asking") as progress:
                collect_responses(answer, questions, responses, progress.show)
        finally:
            if not (responses.exists() and responses.stat().st_size):  # no response, so the settings bind nothing
                responses.unlink(missing_ok=True)
                (output / "settings.json").unlink()
        gold = arguments.data
        if arguments.columns:
            write_records(gold := output / "records.jsonl", records)
    _warn_of_useless(responses)
    form = asked.form
    return Collected(responses, gold, asked.method, asked.position, form.decimals, form.thinking, asked.grader)


def _nothing(*_: object) -> None:
    """Answer no question."""


def _check_options(arguments: argparse.Namespace, is_server: bool) -> None:
    if is_server and not re.match(r"https?://[^/\[\]\s]+", arguments.source):
        raise UsageError(f"{without_password(arguments.source)}: expected a URL such as http://127.0.0.1:8000/v1")
    if is_server and arguments.model is None:
        raise UsageError("--model NAME: expected the name of the model at the URL")
    for name in _LOCAL if is_server else ("model", "form"):
        if getattr(arguments, name) is not None:
            fix = "is for a model on this machine" if is_server else "is for a URL; MODEL's own is used"
            raise UsageError(f"--{name.replace('_', '-')}: {fix}")


def _warn_of_useless(responses: Path) -> None:
    rows = [row for _, row in read_json_lines(responses)]
    for count, what in (
        (sum(row.get("finish_reason") == "length" for row in rows), "were cut by --max-tokens"),
        (sum(not row["response"].strip() for row in rows), "are empty; evaluate counts them as wrong"),
    ):
        if count:
            print_note(f"warning: {count} of {len(rows)} responses {what}")


def _of_server(arguments: argparse.Namespace, _: Sequence[Record]) -> _Asked:
    from coca_mindspeed.evaluation.endpoint import Endpoint

    given = {
        name: default if (value := getattr(arguments, name)) is None else value for name, default in _SERVER.items()
    }
    options: dict[str, Any] = {"temperature": arguments.temperature, "max_tokens": given["max_tokens"]}
    if arguments.chat_template_kwargs:
        options["extra_body"] = {"chat_template_kwargs": arguments.chat_template_kwargs}
    name, form = _form(arguments)
    settings = {
        "URL": without_password(arguments.source),
        "--model": arguments.model,
        "--method": name,
        "request": options,
    }
    if arguments.form is not None:
        settings["content of --form"] = form.model_dump(mode="json")
    endpoint = Endpoint(arguments.source, arguments.model, given["concurrency"], options, form)
    return _Asked(settings, name, training_method(name).confidence_position, form, lambda: endpoint.answer)


def _of_model(arguments: argparse.Namespace, records: Sequence[Record]) -> _Asked:
    """A model on this machine, whose prompts and memory are checked."""
    arguments.seed, arguments.trust_remote_code = arguments.seed or 0, bool(arguments.trust_remote_code)
    if arguments.method is not None:
        _method(arguments.method)
    path, config, trained = local_model(arguments.source, arguments)
    method = config.method.training_method
    form = PromptForm(
        system_prompt=config.method.system_prompt,
        instructions={},
        decimals=config.method.confidence_decimals,
        thinking=config.method.thinking,
    )
    if trained is not None and trained.method in (None, method.name):
        form = trained.form
    at_once = arguments.concurrency or _LOCAL_AT_ONCE
    settings = {
        "MODEL": str(path),
        "content of MODEL": fingerprint(path),
        "--method": method.name,
        "--max-tokens": config.rollout.max_new_tokens,
        "--temperature": arguments.temperature,
        "--seed": config.seed,
        "form": form.model_dump(mode="json"),
        "--chat-template-kwargs": arguments.chat_template_kwargs,
    }

    def start() -> Answerer:
        from coca_mindspeed.local.collect import LocalAnswers, plan_collection  # torch takes seconds to import
        from coca_mindspeed.local.load import load_policy
        from coca_mindspeed.local.policy import choose_device

        device = choose_device(arguments.device or "auto", where="--device")
        memory = plan_collection(config, records, form, at_once, device)
        print_note(f"loading {path} on {device}: {memory}")
        policy = load_policy(path, config.model, device, where="MODEL")
        return LocalAnswers(policy, config, form, at_once).answer

    grader = None if config.data.train == "unknown" else (config.data.grader, config.data.grader_options)
    return _Asked(settings, config.method.label, method.confidence_position, form, start, grader)


def _method(name: str) -> Any:
    try:
        return training_method(name)
    except ValueError as error:
        raise UsageError(f"--method: {error}") from error


def _form(arguments: argparse.Namespace) -> tuple[str, PromptForm]:
    """The method's name, and the form of the prompts: that of ``--form``, or the method's, without instructions."""
    given = arguments.chat_template_kwargs or {}
    if arguments.form is not None:
        trained = require_trained_prompt(arguments.form, "--form")
        if trained.method is not None and arguments.method not in (None, trained.method):
            raise UsageError(f"--method {arguments.method}: --form is of a model trained by {trained.method}")
        form = trained.form
        if arguments.thinking and not form.thinking:
            raise UsageError("--thinking: --form is of a model trained without thinking")
        form = form.model_copy(update={"template_variables": {**form.template_variables, **given}})
        return trained.method or arguments.method or "coca", form
    method = _method(arguments.method or "coca")
    settings = method_settings(method.name, thinking=bool(arguments.thinking))
    common: dict[str, Any] = {"instructions": {}, "template_variables": given, "thinking": settings.thinking}
    return method.name, PromptForm(system_prompt=settings.system_prompt, **common)
