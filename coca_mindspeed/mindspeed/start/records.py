"""Record files of a run: the same on every node, their prompts with the chat template applied, and their checks.

Rows carry the index of their record: a node with another version of a file would grade responses by the answers to
other questions.
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.data.prompts import (
    TemplateKeys,
    bounded_prompt_tokens,
    check_template,
    no_chat_template,
    write_into_template,
)
from coca_mindspeed.data.records import LayoutError, Record, read_records
from coca_mindspeed.data.registry import conversion_command
from coca_mindspeed.errors import ConfigError, DataError, raise_problems
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.utils.files import file_sha256, fingerprint

#: SHA-256 of record files -> their prompts, token ids int32 one after the other and where each of them ends.
Encoded = dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
_encoded: Encoded = {}  # those that the starting process has given to this one


@dataclass(frozen=True, slots=True)
class _Version:
    """A file's content, as far as the file system tells; the path is only where it was read first."""

    path: Path = field(compare=False)
    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Version":
        status = path.stat()
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _digest(version: _Version) -> str:
    return file_sha256(version.path)


@lru_cache(maxsize=2)  # of training and validation
def _records(version: _Version) -> tuple[Record, ...]:
    return tuple(read_records(version.path))


def record_files(data_path: str | None, eval_data: str | Path | None) -> list[Path]:
    """The record files of training and validation, as far as they are set."""
    return [Path(path) for path in (data_path, eval_data) if path is not None]


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by path of the files that are on this machine; a run may be planned and started elsewhere."""
    return {str(path): _digest(_Version.of(path)) for path in paths if path.is_file()}


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
    if wanted is not None and (found := _digest(_Version.of(path))) != wanted:
        raise DataError(
            f"{path}: on {socket.gethostname()} the file has SHA-256 {found[:12]}…, expected {wanted[:12]}… as where "
            "the run was started; copy it to every node, or use a shared file system"
        )
    return read_record_file(path)


def weights_digests(folders: Iterable[Path]) -> dict[str, str]:
    """:func:`fingerprint` by path of the folders of weights, and those in them, that are on this machine.

    Hidden ones are of a download, which notes its time there.
    """
    inside = {place: place.relative_to(folder) for folder in folders for place in (folder, *folder.rglob("*"))}
    shown = [
        place for place, below in inside.items() if place.is_dir() and not any(part[0] == "." for part in below.parts)
    ]
    return {str(place): str(fingerprint(place)) for place in shown}


def differing_files(planned: Mapping[str, str]) -> list[str]:
    """Lines for the files of ``planned`` (SHA-256 by path) that this machine lacks or has with another content.

    Those of folders are :func:`fingerprint`.
    """
    host = socket.gethostname()
    found = {path: (fingerprint if Path(path).is_dir() else _sha256)(Path(path)) for path in planned}
    return [
        f"{path}: on {host} " + (f"SHA-256 {digest[:12]}…, expected {planned[path][:12]}…" if digest else "not there")
        for path, digest in found.items()
        if digest != planned[path]
    ]


def _sha256(path: Path) -> str | None:
    return file_sha256(path) if path.is_file() else None


def check_files_on_nodes(planned: Mapping[str, str]) -> None:
    """Compare files on every node of the Ray cluster with ``planned`` before a model is built: records and weights.

    ``planned`` is ``coca.data_sha256``, and :func:`weights_digests`.  Raises DataError with a line for each file and
    folder of a node that differs.
    """
    if not planned:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(differing_files)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    found = ray.get([task.options(num_cpus=0, scheduling_strategy=place).remote(planned) for place in places])
    if lines := [*dict.fromkeys(line for lines in found for line in lines)]:
        fix = "copy the files to every node, or use a shared file system"
        raise DataError("\n".join(["the nodes have different files:", *lines, fix]))


def read_record_file(path: Path) -> list[Record]:
    """The records of a file, which a process parses once for each version of the file.

    Raises DataError for another layout, with the command that converts the file, or for a record that cannot be used.
    """
    try:
        return list(_records(_Version.of(path)))
    except LayoutError as error:
        fix = f"convert it, and name its train.jsonl: {conversion_command(path)}"
        raise DataError(f"{error.reason}\n    {fix}") from error


def load_prompts(
    path: Path, tokenizer: Any, settings: CocaSettings, max_tokens: int, name_of: Callable[[str], str] = str
) -> tuple[list[Record], list[NDArray[np.int32]]]:
    """Read all records of a file and encode their prompts; writes the run's variables into the chat template.

    Raises ConfigError for a chat template that cannot be trained on, DataError for a file without records or with
    another checksum than planned, or for a prompt that is longer than ``max_tokens``.
    """
    records = read_run_records(path, settings.data_sha256)
    if not records:
        raise DataError(f"{path}: no record found")
    model = name_of("model.path")
    if tokenizer.chat_template is None:
        raise_problems([no_chat_template(model, tokenizer.name_or_path)])
    day = None if settings.prompt_date is None else date.fromisoformat(settings.prompt_date)
    write_into_template(tokenizer, settings.chat_template_kwargs, day)
    prompt = settings.method.system_prompt
    clock = f"set {name_of('model.prompt_date')}=YYYY-MM-DD"
    keys = TemplateKeys(name_of("model.chat_template_kwargs"), name_of("method.thinking"), clock)
    model += f"={tokenizer.name_or_path}"
    check_template(tokenizer, records, prompt, model, keys, thinking=settings.method.thinking)
    if (given := _encoded.get(settings.data_sha256.get(str(path), ""))) is not None:
        token_ids, ends = given
        return records, np.split(token_ids, ends[:-1])
    rows = bounded_prompt_tokens(tokenizer, records, prompt, max_tokens, "rl_config.max_prompt_length")
    return records, [np.asarray(ids, dtype=np.int32) for ids in rows]


def take_prompts(encoded: Encoded) -> None:
    """Let :func:`load_prompts` of this process use prompts that the starting process has encoded."""
    _encoded.update(encoded)


def check_prompts_of_files(
    path: Path, files: Sequence[Path], settings: CocaSettings, max_tokens: int, name_of: Callable[[str], str] = str
) -> Encoded:
    """Encode the prompts of the record files that are on this machine with the tokenizer in ``path``.

    ``name_of`` gives the names of our keys in the run's file.

    Raises ConfigError if the tokenizer does not load or ends a turn with another token than its end of text, or as
    :func:`load_prompts`.
    """
    present = [file for file in files if file.is_file()]
    if not present or not (path / "tokenizer.json").is_file():
        return {}
    from transformers import AutoTokenizer

    model = f"{name_of('model.path')}={path}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ConfigError(f"{model}: its tokenizer cannot be loaded: {error}") from error
    _check_end_of_text(tokenizer, model)
    encoded: Encoded = {}
    for file in present:
        print(f"coca-mindspeed: checking the prompts of {file}", flush=True)
        _, rows = load_prompts(file, tokenizer, settings, max_tokens, name_of)
        encoded[settings.data_sha256[str(file)]] = np.concatenate(rows), np.cumsum([len(row) for row in rows])
    return encoded


def _check_end_of_text(tokenizer: Any, model: str) -> None:
    """Check that a turn of the chat ends with the tokenizer's end of text.

    vLLM stops at the model's own end of a turn. MindSpeed-RL cuts a response behind the tokenizer's, which is also its
    padding: if they differ, a token that was never sampled is trained.
    """
    template, end = str(tokenizer.chat_template or ""), str(tokenizer.eos_token)
    # A template of plain text, or none, ends its turns with nothing: only the model's own end of text is left.
    # The padding token may be any text, which the template may hold by chance.
    marks = {str(token) for token in tokenizer.added_tokens_decoder.values()} - {tokenizer.pad_token}
    if any(mark in template for mark in marks) and end not in template and "eos_token" not in template:
        raise ConfigError(
            f"{model}: eos_token is {end!r}, expected the token that ends a turn of the chat template; set "
            "it in tokenizer_config.json (Llama 3: <|eot_id|>), as newer versions have it"
        )
