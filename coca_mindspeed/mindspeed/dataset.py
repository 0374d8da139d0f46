"""Prompts for MindSpeed-RL straight from a file of records: the chat template applied, epoch after epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from coca_mindspeed.data.prompts import prompt_messages, prompt_tokens
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed import columns
from coca_mindspeed.mindspeed.process import process_settings


def is_record_file(path: str) -> bool:
    """Whether ``megatron_training.data_path`` names records, and not the prefix of a preprocessed data set."""
    return path.endswith(".jsonl")


def prompt_ids(record: Record, tokenizer: Any, system_prompt: str | None, max_tokens: int) -> list[int]:
    """Token ids of a record's prompt.

    Raises:
        DataError: it is longer than ``max_tokens``; a prompt is never cut.
    """
    ids = prompt_tokens(tokenizer, prompt_messages(record, system_prompt))
    if len(ids) > max_tokens:
        raise DataError(
            f"record {record.id!r} has a prompt of {len(ids)} tokens, rl_config.max_prompt_length is {max_tokens}; "
            "raise it or leave the record out"
        )
    return ids


class RecordPrompts(Dataset[dict[str, Any]]):
    """``samples`` prompts: every epoch is a permutation of all records, drawn from the seed and the epoch."""

    def __init__(
        self, records: Sequence[Record], prompts: Sequence[Sequence[int]], samples: int, seed: int, shuffle: bool
    ) -> None:
        self._prompts = prompts
        self._order = np.concatenate(
            [
                np.random.default_rng((seed, epoch)).permutation(len(records)) if shuffle else np.arange(len(records))
                for epoch in range(-(-samples // len(records)))
            ]
        )[:samples]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = int(self._order[position])
        return {"input_ids": np.asarray(self._prompts[index], dtype=np.int64), columns.RECORD: np.array([index])}


def load_prompts(path: Path, tokenizer: Any, max_tokens: int) -> tuple[list[Record], list[list[int]]]:
    """All records of a file, and the token ids of their prompts under this run's method.

    Raises:
        DataError: the file has no record, or a prompt is too long.
    """
    records = list(read_records(path))
    if not records:
        raise DataError(f"{path}: no record found")
    system_prompt = process_settings().coca.training_method.system_prompt
    return records, [prompt_ids(record, tokenizer, system_prompt, max_tokens) for record in records]


def record_datasets(original: Any) -> Any:
    """Wrap ``build_train_valid_test_datasets``: records where ``data_path`` ends in .jsonl, else MindSpeed-RL's own."""

    def build_train_valid_test_datasets(**arguments: Any) -> Any:
        (data_path,) = arguments["data_prefix"]
        if not is_record_file(data_path):
            return original(**arguments)
        config = arguments["extra_param"]
        if columns.RECORD not in config.dataset_additional_keys:
            raise ConfigError(
                f"megatron_training.dataset_additional_keys: {data_path} holds records, so it should be "
                f"[{columns.RECORD}], found {list(config.dataset_additional_keys)}"
            )
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path)
        records, prompts = load_prompts(Path(data_path), tokenizer, config.max_prompt_length)
        samples = arguments["train_valid_test_num_samples"][0]
        train = RecordPrompts(records, prompts, samples, arguments["seed"], not config.no_shuffle)
        return train, None, None

    return build_train_valid_test_datasets


def in_order(original: Any) -> Any:
    """For the manifest: ``PromptDataLoader``; records come shuffled by epoch already and are not shuffled again."""

    def prompt_data_loader(
        dataset: Any,
        global_batch_size: int,
        num_workers: int,
        seed: int,
        additional_keys: Sequence[str],
        no_shuffle: bool,
    ) -> Any:
        if isinstance(dataset, RecordPrompts):
            no_shuffle, num_workers = True, 0
        return original(dataset, global_batch_size, num_workers, seed, additional_keys, no_shuffle)

    return prompt_data_loader
