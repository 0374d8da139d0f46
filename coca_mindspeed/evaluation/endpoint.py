"""Responses of a model behind an OpenAI-compatible server."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.data.prompts import form_digest, prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.collection import Add, Key
from coca_mindspeed.utils.chat_client import ChatClient, ChatError, warn_of_thoughts
from coca_mindspeed.utils.console import one_line, without_password

#: Environment variable with the key; a server that needs none is asked without it.
KEY_VARIABLE = "OPENAI_API_KEY"
_LONGEST = 500  # characters of a list of models


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of an OpenAI-compatible server."""

    url: str  # such as http://127.0.0.1:8000/v1
    model: str  # its name on the server
    concurrency: int  # simultaneous requests
    options: Mapping[str, Any]  # further fields of a request, such as temperature
    form: PromptForm  # of the prompts

    def answer(self, questions: Mapping[Key, Record], add: Add) -> None:
        """Ask the questions; ``tokens`` is None if the server does not count them.

        Raises:
            ConfigError: the server cannot be reached, fails, or knows neither the key nor the model.
            DataError: the server refuses a question.
        """
        asyncio.run(_ask_all(self, questions, add))


async def _ask_all(endpoint: Endpoint, questions: Mapping[Key, Record], add: Add) -> None:
    left, form = iter(questions.items()), endpoint.form
    client = ChatClient(endpoint.url, os.environ.get(KEY_VARIABLE))
    try:
        try:
            models = await client.models()
        except ChatError as error:
            raise _explained(error, endpoint, None, None) from error

        async def work() -> None:
            for asked, record in left:
                request = {"model": endpoint.model, **endpoint.options}
                request["messages"] = prompt_messages(record, form.system_prompt, form)
                try:
                    reply = await client.complete(request)
                except ChatError as error:
                    raise _explained(error, endpoint, models, record) from error
                digest = form_digest(record, form.system_prompt, form)
                row = {
                    "response": reply.response(form.thinking),
                    "tokens": reply.tokens,
                    "finish_reason": reply.finish_reason,
                }
                add(asked, {**row, "form": digest})

        await asyncio.gather(*(work() for _ in range(min(endpoint.concurrency, len(questions)))))
        warn_of_thoughts(client.thoughts, form.thinking)
    finally:
        await client.close()


def _explained(
    error: ChatError, endpoint: Endpoint, models: list[str] | None, record: Record | None
) -> ConfigError | DataError:
    """The error for the user of a failed request; ``record`` None: of the list of models."""
    where, status, said = without_password(endpoint.url), error.status, str(error)
    if status is None:
        return ConfigError(f"{where}: gives no answer: {said}")
    if status in (401, 403):
        return ConfigError(f"{where}: refuses the key in the environment variable {KEY_VARIABLE}: {said}")
    if status == 404 and models:
        names = ", ".join(map(one_line, models))
        return ConfigError(f"--model {endpoint.model}: unknown to {where}, which has: {names[:_LONGEST]}")
    if status == 404:
        return ConfigError(
            f"{where}: {said}; expected a URL below which chat/completions is, often .../v1, and a --model"
        )
    if status in (400, 413, 422) and record is not None:
        fix = "lower --max-tokens, or serve the model with a longer context" if "context" in said.lower() else ""
        return DataError("; ".join(filter(None, (f"record {record.id!r}: the server refuses it: {said}", fix))))
    return ConfigError(f"{where}: {said}; the responses so far are saved, the same command resumes")
