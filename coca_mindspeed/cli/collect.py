"""``coca-mindspeed collect``: a served model's responses to a file of records, which ``evaluate`` grades."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.cli.options import at_least, place, template_variables, within
from coca_mindspeed.cli.trained_prompt import FORM_HELP, require_trained_prompt
from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.data.records import read_records, records_digest
from coca_mindspeed.errors import DataError, UsageError
from coca_mindspeed.utils.console import print_text, without_password
from coca_mindspeed.utils.json_files import read_complete_rows, read_json_lines
from coca_mindspeed.utils.packages import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("url", metavar="URL", help="of an OpenAI-compatible server, http://127.0.0.1:8000/v1 for example")
    option("--model", required=True, metavar="NAME", help="name of the model at URL")
    option("--data", type=place, required=True, metavar="FILE", help="records with the questions")
    option("--output", type=place, required=True, metavar="DIR", help="for responses.jsonl; the same command resumes")
    option("--method", metavar="NAME", help="method whose prompt is sent (default: the form's, or coca)")
    option("--form", type=place, metavar="DIR", help=FORM_HELP)
    option("--samples", type=at_least(1), default=1, metavar="N", help="responses to each question (default: 1)")
    option("--concurrency", type=at_least(1), default=16, metavar="N", help="requests at once (default: 16)")
    option("--temperature", type=within(0, 2), default=1.0, metavar="T", help="sampling temperature (default: 1.0)")
    option("--max-tokens", type=at_least(1), default=4096, metavar="N", help="longest response (default: 4096)")
    variables = 'variables of the chat template, {"enable_thinking": false} for example (vLLM, SGLang)'
    option("--chat-template-kwargs", type=template_variables, metavar="JSON", help=variables)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server for the responses that ``--output`` lacks."""
    if not re.match(r"https?://[^/\[\]\s]+", arguments.url):
        raise UsageError(f"{without_password(arguments.url)}: expected a URL such as http://127.0.0.1:8000/v1")
    name, form = _form(arguments)
    require("openai", "tenacity", purpose="collect")
    from coca_mindspeed.evaluation.endpoint import Endpoint, ask
    from coca_mindspeed.utils.directories import check_directory, check_writable, claim_directory, lock_run
    from coca_mindspeed.utils.process import interruptible
    from coca_mindspeed.utils.progress import StepProgress

    output: Path = arguments.output
    records = list(read_records(arguments.data))
    if not records:
        raise DataError(f"--data {arguments.data}: holds no records")
    options: dict[str, Any] = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    if arguments.chat_template_kwargs:
        options["extra_body"] = {"chat_template_kwargs": arguments.chat_template_kwargs}
    settings = {
        "URL": without_password(arguments.url),
        "--model": arguments.model,
        "--method": name,
        "--samples": arguments.samples,
        "request": options,
        "content of --data": records_digest(records)["sha256"],
    }
    if arguments.form is not None:
        settings["content of --form"] = form.model_dump(mode="json")
    check_directory(output, settings)
    check_writable(output)
    questions = {(record.id, sample): record for record in records for sample in range(arguments.samples)}
    endpoint = Endpoint(arguments.url, arguments.model, arguments.concurrency, options)
    responses = output / "responses.jsonl"
    saved = f"stopped; the responses so far are in {responses}; the same command resumes"
    with lock_run(output), interruptible(saved):
        claim_directory(output, settings)
        done = len(read_complete_rows(responses)) if responses.exists() else 0
        try:
            with StepProgress(len(questions), True, done, title="asking") as progress:
                ask(endpoint, questions, form, responses, progress.show)
        finally:
            if not (responses.exists() and responses.stat().st_size):  # no response, so the settings bind nothing
                responses.unlink(missing_ok=True)
                (output / "settings.json").unlink()
    rows = [row for _, row in read_json_lines(responses)]
    for count, what in (
        (sum(row.get("finish_reason") == "length" for row in rows), "were cut by --max-tokens"),
        (sum(not row["response"].strip() for row in rows), "are empty; evaluate counts them as wrong"),
    ):
        if count:
            print_text(f"warning: {count} of {len(questions)} responses {what}", sys.stderr)
    grade = ["coca-mindspeed", "evaluate", str(responses), "--gold", str(arguments.data)]
    grade += ["--method", name, "--output", str(output)]
    grade += [] if form.decimals is None else ["--decimals", str(form.decimals)]
    print_text(f"{len(questions)} responses: {responses}; grade them: {shlex.join(grade)}")
    return 0


def _form(arguments: argparse.Namespace) -> tuple[str, PromptForm]:
    """The method's name, and the form of the prompts: that of ``--form``, or the method's, without instructions."""
    given = arguments.chat_template_kwargs or {}
    if arguments.form is not None:
        trained = require_trained_prompt(arguments.form, "--form")
        if trained.method is not None and arguments.method not in (None, trained.method):
            raise UsageError(f"--method {arguments.method}: --form is of a model trained by {trained.method}")
        form = trained.form
        form = form.model_copy(update={"template_variables": {**form.template_variables, **given}})
        return trained.method or arguments.method or "coca", form
    try:
        method = training_method(arguments.method or "coca")
    except ValueError as error:
        raise UsageError(f"--method: {error}") from error
    return method.name, PromptForm(system_prompt=method.system_prompt, instructions={}, template_variables=given)
