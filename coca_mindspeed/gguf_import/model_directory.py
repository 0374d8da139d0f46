"""The whole import: a GGUF file in, a Hugging Face directory out, whole or absent."""

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

from coca_mindspeed.data.prepare.output import check_output_path, output_directory
from coca_mindspeed.errors import DataError
from coca_mindspeed.gguf_import.architectures import check_architecture
from coca_mindspeed.gguf_import.byte_level import build_tokenizer
from coca_mindspeed.gguf_import.header import read_header


@dataclass(frozen=True)
class ImportedModel:
    """What was imported.

    Attributes:
        architecture: ``llama`` or ``qwen2``.
        parameters: how many, the tied output layer counted once.
        tokens: ids of the tokenizer.
        end_of_turn: the token that ends a response, or None.
        has_chat_template: whether the file brought one.
    """

    architecture: str
    parameters: int
    tokens: int
    end_of_turn: str | None
    has_chat_template: bool


def import_gguf(file: Path, output: Path, *, overwrite: bool = False) -> ImportedModel:
    """Turn a GGUF file into a Hugging Face directory of float32 weights.

    Args:
        file: of the architecture Llama or Qwen2, with a byte-level BPE tokenizer.
        output: the directory to make.
        overwrite: replace an earlier import.

    Raises:
        DataError: the file is not one that can be imported rightly, or the output's place is taken.  Nothing is left.
    """
    check_output_path(output, overwrite)
    before = _identity(file)
    header = read_header(file)
    architecture = check_architecture(header, file)
    tokenizer = build_tokenizer(header.metadata, file)
    with output_directory(output, overwrite, kind="model") as directory:
        model = _load(file)
        if _identity(file) != before:
            raise DataError(f"{file}: was changed while it was read")
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


def _identity(file: Path) -> tuple[int, ...]:
    """Changes when the file is replaced or written to."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _load(file: Path) -> Any:
    """The model by transformers' own reader of GGUF; ``from_pretrained`` would ask for accelerate besides."""
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(str(file.absolute().parent), gguf_file=file.name, local_files_only=True)
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        loading = model.load_state_dict(tensors, strict=False)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{file}: transformers cannot read its weights: {error!s:.300}") from error
    # The file holds every tensor, in its shape; what is not read then is a mistake of ours or of transformers.
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
    """Keep warnings and a progress bar for each tensor from the terminal; what matters is raised."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
