"""How model families write chat messages, as MindSpeed-RL's prompt templates say it.

The layouts are facts about Qwen2.5-Instruct's and Llama-3-Instruct's tokenizers.  Both families cut text at their
special tokens, so that a message's tokens do not depend on its neighbours: MindSpeed-RL, which encodes system and
user part one by one, can meet the chat template token for token.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coca_mindspeed.data.prepare.output import check_output_path, output_directory
from coca_mindspeed.data.prompts import instruction_suffix, prompt_messages, prompt_tokens
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import to_json_line, write_atomically, write_json
from coca_mindspeed.utils.tokenization import load_tokenizer


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


HANDLER = "R1AlpacaStyleInstructionHandler"  # packs the prompt alone: the response is sampled


@dataclass(frozen=True, slots=True)
class MindSpeedExport:
    """What to export.

    Attributes:
        records: prepared records (JSON Lines).
        system_prompt: the method's.
        layout: how the model's chat template writes messages.
        tokenizer: the model's tokenizer directory, as MindSpeed-RL will find it; where it is here too, every prompt
            is compared with its chat template.
        workers: processes of ``preprocess_data.py``.
    """

    records: Path
    system_prompt: str
    layout: ChatLayout
    tokenizer: Path
    workers: int = 8

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise DataError(f"the number of workers should be at least 1, found {self.workers}")


def export(what: MindSpeedExport, output: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write the files into ``output``, whole or not at all, and return what ``report.json`` says.

    Raises:
        DataError: there are no records, one cannot be said in MindSpeed-RL's form, the template does not give the
            tokens of the tokenizer's own chat template, or the output exists.
    """
    # What can be known is known before the records are read through.
    check_output_path(output, overwrite)
    tokenizer = _tokenizer(what)
    suffix = _shared_suffix(read_records(what.records))
    template = what.layout.template(what.system_prompt, suffix)
    with output_directory(output, overwrite) as directory:
        with (directory / "questions.jsonl").open("w", encoding="utf-8") as questions:
            number = 0
            for record in read_records(what.records):
                questions.write(to_json_line(_row(record, suffix, what)))
                number += 1
        checked = 0 if tokenizer is None else _check(what, tokenizer, template, directory / "questions.jsonl")
        final = output.resolve()
        write_json(directory / "templates.json", [template])
        settings = _dataset_yaml(what, template["name"], final)
        write_atomically(directory / "dataset.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        (directory / "packed").mkdir()
        report = {
            "records": number,
            "prompt_type": template["name"],
            "instruction_in_template": suffix,
            "prompts_equal_to_chat_template": checked,
            "training": {
                "data_path": settings["output_prefix"],
                "prompt_type": template["name"],
                "prompt_type_path": settings["prompt_type_path"],
                "dataset_additional_keys": settings["dataset_additional_keys"],
            },
        }
        write_json(directory / "report.json", report)
    return report


def _shared_suffix(records: Iterable[Record]) -> str:
    """The instruction that all records have after their question, or nothing if they differ."""
    suffixes = {instruction_suffix(record) for record in records}
    if not suffixes:
        raise DataError("there are no records to export")
    shared = suffixes.pop() if len(suffixes) == 1 else ""
    return "" if "{{" in shared else shared


def _row(record: Record, suffix: str, what: MindSpeedExport) -> dict[str, str]:
    if record.category != "math":
        raise DataError(
            f"{what.records}: record {record.id!r}: MindSpeed-RL's labels hold a gold answer of mathematics, and this "
            f"is {record.category}; train on the records themselves (megatron_training.data_path: {what.records})"
        )
    *system, user = prompt_messages(record, what.system_prompt)
    content = what.layout.message(user["content"])
    if "{{idx}}" in content:
        raise DataError(
            f"{what.records}: record {record.id!r}: MindSpeed-RL replaces '{{{{idx}}}}' in a question by a number; "
            "reword the question"
        )
    if record.system is not None and not record.system.strip():
        raise DataError(
            f"{what.records}: record {record.id!r}: an empty system prompt cannot be exported: MindSpeed-RL puts the "
            "template's in its place; leave it null for the method's own"
        )
    own_system = "" if record.system is None else what.layout.message(system[0]["content"])
    return {
        "question": content.removesuffix(suffix) if suffix else content,
        "label": _label(record, what),
        "system": own_system,
    }


def _label(record: Record, what: MindSpeedExport) -> str:
    """The gold answer; packing would keep an empty label as a row of no tokens."""
    if not record.answer.strip():
        raise DataError(f"{what.records}: record {record.id!r}: the gold answer is empty")
    return record.answer.strip()


def _dataset_yaml(what: MindSpeedExport, template: str, final: Path) -> dict[str, Any]:
    """The configuration of ``preprocess_data.py``; absolute paths, since it takes others from its own repository."""
    return {
        "input": str(final / "questions.jsonl"),
        "tokenizer_name_or_path": str(what.tokenizer.absolute()),
        "output_prefix": str(final / "packed" / "coca"),
        "handler_name": HANDLER,
        "tokenizer_type": "HuggingFaceTokenizer",
        "workers": what.workers,
        "log_interval": 1000,
        "prompt_type": template,
        "prompt_type_path": str(final / "templates.json"),
        "map_keys": {"prompt": "question", "query": "", "response": "label", "system": "system"},
        "dataset_additional_keys": ["labels"],
        "cache_dir": str(final / "packed" / "cache"),
        "overwrite_cache": True,
    }


def _tokenizer(what: MindSpeedExport) -> Any:
    """The tokenizer to compare with, or None if it is on another machine."""
    if not what.tokenizer.is_dir():
        return None
    tokenizer = load_tokenizer(what.tokenizer)
    if tokenizer.chat_template is None:
        raise DataError(f"{what.tokenizer}: the tokenizer has no chat template to export prompts for")
    if what.layout.begins_with_bos and tokenizer.bos_token_id is None:
        raise DataError(
            f"{what.tokenizer}: the prompt template {what.layout.name!r} begins with a BOS token, and this tokenizer "
            "has none. Choose the --template of this model's family"
        )
    return tokenizer


def _check(what: MindSpeedExport, tokenizer: Any, template: dict[str, Any], questions: Path) -> int:
    """Compare every prompt's tokens with the tokenizer's chat template; returns how many were compared."""
    number = 0
    for record, row in zip(read_records(what.records), _rows(questions), strict=True):
        number += 1
        messages = prompt_messages(record, what.system_prompt)
        expected = prompt_tokens(tokenizer, messages)
        actual = what.layout.encode(tokenizer, template, row["question"], row["system"])
        if actual != expected:
            place = next(
                (i for i, (a, e) in enumerate(zip(actual, expected, strict=False)) if a != e),
                min(len(actual), len(expected)),
            )
            ours, theirs = (tokenizer.decode(ids[place : place + 12]) for ids in (actual, expected))
            raise DataError(
                f"{what.records}: record {record.id!r}: the prompt template {what.layout.name!r} does not give the "
                f"tokens of this tokenizer's chat template; from token {place} on they are {ours!r} and {theirs!r}. "
                "Choose the --template of this model's family"
            )
    return number


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
