"""Files of a run: records, which its starting process reads for all others, with their prompts; and weights, which
must be the same on every node.

Rows carry the index of their record, so every process must have the same records.
"""

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
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

#: Token ids, int32, of prompts one after the other, and where each of them ends.
Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records, as the process that starts a run has read it.

    Attributes:
        records: all of its records.
        sha256: of its content.
        prompts: of its records; None: not encoded, because the tokenizer is not here.
    """

    records: tuple[Record, ...]
    sha256: str
    prompts: Encoded | None = None


_files: dict[str, RecordFile] = {}  # of the run, by path; the starting process has given them to this one


def take_files(files: Mapping[str, RecordFile]) -> None:
    """Let this process use the files of a run that the starting process has read, by their absolute paths."""
    _files.update(files)


def run_records(path: str | Path) -> tuple[Record, ...]:
    """The records of a file of the run that :func:`take_files` has been given."""
    return _files[str(path)].records


def all_records() -> dict[str, tuple[Record, ...]]:
    """The records of all files of the run, by path, for its other processes."""
    return {path: file.records for path, file in _files.items()}


def weights_digests(folders: Iterable[Path]) -> dict[str, str]:
    """:func:`fingerprint` by path of the folders of weights, and those in them, that are on this machine.

    Hidden ones are of a download, which notes its time there.
    """
    inside = {place: place.relative_to(folder) for folder in folders for place in (folder, *folder.rglob("*"))}
    shown = [
        place for place, below in inside.items() if place.is_dir() and not any(part[0] == "." for part in below.parts)
    ]
    return {str(place): str(fingerprint(place)) for place in shown}


def differing_weights(planned: Mapping[str, str]) -> list[str]:
    """Lines for the folders of ``planned`` (:func:`fingerprint` by path) that are missing or different here."""
    host = socket.gethostname()
    found = {path: fingerprint(Path(path)) for path in planned}
    return [
        f"{path}: on {host} " + (f"SHA-256 {digest[:12]}…, expected {planned[path][:12]}…" if digest else "not there")
        for path, digest in found.items()
        if digest != planned[path]
    ]


def check_weights_on_nodes(planned: Mapping[str, str]) -> None:
    """Compare weights on every node of the Ray cluster with ``planned`` (:func:`weights_digests`).

    Raises DataError with a line for each folder of a node that differs.
    """
    if not planned:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(differing_weights)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    found = ray.get([task.options(num_cpus=0, scheduling_strategy=place).remote(planned) for place in places])
    if lines := [*dict.fromkeys(line for lines in found for line in lines)]:
        fix = "copy them to every node, or use a shared file system"
        raise DataError("\n".join(["the nodes have different weights:", *lines, fix]))


def read_record_file(path: Path) -> RecordFile:
    """Read a file of records.

    Raises DataError for another layout, with the command that converts the file, or for a record that cannot be used.
    """
    try:
        return RecordFile(sha256=file_sha256(path), records=tuple(read_records(path)))
    except LayoutError as error:
        fix = f"convert it, and name its train.jsonl: {conversion_command(path)}"
        raise DataError(f"{error.reason}\n    {fix}") from error


def load_prompts(path: str | Path, tokenizer: Any, settings: CocaSettings, max_tokens: int) -> list[NDArray[np.int32]]:
    """The prompts of a file of the run; raises as :func:`encode_file` if they are still to be encoded."""
    file = _files[str(path)]
    token_ids, ends = file.prompts or encode_file(path, file, tokenizer, settings, max_tokens)
    return np.split(token_ids, ends[:-1])


def encode_file(
    path: str | Path,
    file: RecordFile,
    tokenizer: Any,
    settings: CocaSettings,
    max_tokens: int,
    name_of: Callable[[str], str] = str,
) -> Encoded:
    """Encode the prompts of a file; writes the run's variables into the chat template.

    Raises ConfigError for a chat template that cannot be trained on, DataError for a file without records, or for a
    prompt that is longer than ``max_tokens``.
    """
    if not file.records:
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
    check_template(tokenizer, file.records, prompt, model, keys, thinking=settings.method.thinking)
    encoded = bounded_prompt_tokens(tokenizer, file.records, prompt, max_tokens, "rl_config.max_prompt_length")
    rows = [np.asarray(ids, dtype=np.int32) for ids in encoded]
    return np.concatenate(rows), np.cumsum([len(row) for row in rows])


def encode_files(
    path: Path,
    files: Mapping[str, RecordFile],
    settings: CocaSettings,
    max_tokens: int,
    name_of: Callable[[str], str] = str,
) -> dict[str, RecordFile]:
    """Encode the prompts of files, by path, with the tokenizer in ``path``, if it is here.

    ``name_of`` gives the names of our keys in the run's file.

    Raises ConfigError if the tokenizer does not load or ends a turn with another token than its end of text, or as
    :func:`encode_file`.
    """
    if not files or not (path / "tokenizer.json").is_file():
        return dict(files)
    from transformers import AutoTokenizer

    model = f"{name_of('model.path')}={path}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ConfigError(f"{model}: its tokenizer cannot be loaded: {error}") from error
    _check_end_of_text(tokenizer, model)
    encoded = {}
    for name, file in files.items():
        print(f"coca-mindspeed: checking the prompts of {name}", flush=True)
        prompts = encode_file(name, file, tokenizer, settings, max_tokens, name_of)
        encoded[name] = replace(file, prompts=prompts)
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
