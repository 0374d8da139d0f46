"""The input files of a run: records, the same on every node and on a resume, and the chat template of their prompts.

Rows carry the index of their record: a node with another version of a file would grade responses by the answers to
other questions.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from coca_mindspeed.data.prompts import TEMPLATE_KEYS, check_template, write_into_template
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.utils.files import file_sha256


def record_files(data_path: str | None, eval_data: str | Path | None) -> list[Path]:
    """The record files of training and validation, as far as they are set."""
    return [Path(path) for path in (data_path, eval_data) if path is not None]


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by path of the files that are on this machine; a run may be planned and started elsewhere."""
    return {str(path): file_sha256(path) for path in paths if path.is_file()}


def with_digests(settings: CocaSettings, files: Iterable[Path]) -> CocaSettings:
    """The settings with the SHA-256 of this machine's files, with which every other node compares its own.

    Raises ConfigError if a file has changed since the run was planned.
    """
    planned, found = settings.data_sha256, digests(files)
    for path, digest in found.items():
        if planned.get(path, digest) != digest:
            raise ConfigError(
                f"coca.data_sha256: {path} has changed since the run was planned (SHA-256 {planned[path][:12]}…, found "
                f"{digest[:12]}…); plan it again: start it by its launch script, or run coca-mindspeed check --write"
            )
    return settings.model_copy(update={"data_sha256": {**planned, **found}})


def read_run_records(path: Path, planned: Mapping[str, str]) -> list[Record]:
    """Read a record file of the run on the node of this process; ``planned`` is ``coca.data_sha256``.

    Raises DataError if the file differs on this node, or is no record file.
    """
    wanted = planned.get(str(path))
    if wanted is not None and (found := file_sha256(path)) != wanted:
        raise DataError(
            f"{path}: on {socket.gethostname()} the file has SHA-256 {found[:12]}…, expected {wanted[:12]}… as where "
            "the run was started; copy it to every node, or use a shared file system"
        )
    return list(read_records(path))


def prepare_template(tokenizer: Any, records: Sequence[Record], settings: CocaSettings, path: str | Path) -> None:
    """Write the run's variables and date into the chat template of ``tokenizer``, and check the prompts of ``records``.

    ``path`` is the tokenizer's, for messages.  Raises ConfigError for an unused variable or a refused prompt.
    """
    day = None if settings.prompt_date is None else date.fromisoformat(settings.prompt_date)
    write_into_template(tokenizer, settings.chat_template_kwargs, day)
    prompt = settings.method.training_method.system_prompt
    allow = settings.allow_open_thinking
    check_template(tokenizer, records, prompt, f"model.path={path}", TEMPLATE_KEYS, allow_open_thinking=allow)


def check_prompts_of_files(path: Path, files: Sequence[Path], settings: CocaSettings) -> None:
    """Check the prompts of record files with the tokenizer in ``path``; files that are not on this machine are skipped.

    Raises ConfigError if the tokenizer does not load or has no chat template, or as :func:`prepare_template`.
    """
    records = [record for file in files if file.is_file() for record in read_records(file)]
    if not records or not (path / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ConfigError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path={path}: its tokenizer has no chat template, so prompts cannot be laid out")
    prepare_template(tokenizer, records, settings, path)
