"""Convert a GGUF file into a Hugging Face directory; an error leaves no output."""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from coca_mindspeed.errors import DataError, MissingDependencyError
from coca_mindspeed.utils.files import check_output_path, output_directory
from experiments.gguf_import.architectures import check_architecture
from experiments.gguf_import.header import read_header
from experiments.gguf_import.tokenizer import build_tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """Facts about the converted model; a tied LM head is counted once, ``end_of_turn`` may be None."""

    architecture: str
    parameters: int
    tokens: int
    end_of_turn: str | None
    has_chat_template: bool


def import_gguf(file: Path, output: Path, *, overwrite: bool = False) -> ImportedModel:
    """Convert a Llama or Qwen2 file with a byte-level BPE tokenizer into a directory of float32 weights.

    Raises:
        DataError: the file cannot be converted exactly, or the output exists.
    """
    check_output_path(output, overwrite)
    before = _identity(file)
    header = read_header(file)
    architecture = check_architecture(header, file)
    tokenizer = build_tokenizer(header.metadata, file)
    with output_directory(output, overwrite, kind="model") as directory:
        model = _load(file)
        if _identity(file) != before:
            raise DataError(f"{file}: changed while it was read")
        _name_special_tokens(model, tokenizer)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return ImportedModel(
        architecture,
        sum(parameter.numel() for parameter in model.parameters()),
        len(tokenizer),
        tokenizer.eos_token,
        tokenizer.chat_template is not None,
    )


def gguf_of_package(package: str) -> Path:
    """The GGUF file in the directory of an installed package, which is not imported.

    Raises:
        MissingDependencyError: the package is not installed, or has not exactly one GGUF file.
    """
    found = importlib.util.find_spec(package)
    locations = (found and found.submodule_search_locations) or ()
    files = [path for location in locations for path in Path(location).glob("*.gguf")]
    if len(files) != 1:
        raise MissingDependencyError(
            f"the package {package} should be installed and contain one GGUF file, found {len(files)}; for SmolLM2: "
            "make real"
        )
    return files[0]


def _identity(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _load(file: Path) -> Any:
    """Load by transformers' GGUF reader; ``from_pretrained`` would need accelerate."""
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(str(file.absolute().parent), gguf_file=file.name, local_files_only=True)
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        loading = model.load_state_dict(tensors, strict=False)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{file}: transformers cannot read its weights: {error!s:.300}") from error
    # All tensors were checked, so a missing one is a bug here or in transformers.
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    if problems := (set(loading.missing_keys) - tied) | set(loading.unexpected_keys):
        raise DataError(f"{file}: transformers {transformers.__version__} did not read {sorted(problems)[0]}")
    return model


def _name_special_tokens(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
