"""Prompts for MindSpeed-RL from a file of records: chat template applied, shuffled by epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from coca_mindspeed.data.prompts import bounded_prompt_tokens
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.start.inputs import prepare_template, read_run_records
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.start.settings import CocaSettings


def prompt_token_ids(
    records: Sequence[Record], tokenizer: Any, system_prompt: str | None, max_tokens: int
) -> list[NDArray[np.int32]]:
    """Token ids of the records' prompts; raises ``DataError`` if one is longer than ``max_tokens``."""
    key = "rl_config.max_prompt_length"
    rows = bounded_prompt_tokens(tokenizer, records, system_prompt, max_tokens, key)
    return [np.asarray(ids, dtype=np.int32) for ids in rows]


class RecordPrompts(Dataset[dict[str, Any]]):
    """``samples`` prompts; each epoch is a permutation of all records, drawn from the seed and the epoch."""

    def __init__(
        self, records: Sequence[Record], prompts: Sequence[NDArray[np.int32]], samples: int, seed: int, shuffle: bool
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


def load_prompts(
    path: Path, tokenizer: Any, settings: CocaSettings, max_tokens: int
) -> tuple[list[Record], list[NDArray[np.int32]]]:
    """Read all records of a file and encode their prompts; writes the run's variables into the chat template.

    Raises ConfigError for a chat template that cannot be trained on, DataError for a file without records or with
    another checksum than planned, or for a prompt that is too long.
    """
    records = read_run_records(path, settings.data_sha256)
    if not records:
        raise DataError(f"{path}: no record found")
    prepare_template(tokenizer, records, settings, tokenizer.name_or_path)
    return records, prompt_token_ids(records, tokenizer, settings.method.training_method.system_prompt, max_tokens)


def record_datasets(_original: Any) -> Any:
    """Replace ``build_train_valid_test_datasets``: the training set is a file of records."""

    def build_train_valid_test_datasets(**arguments: Any) -> Any:
        (data_path,) = arguments["data_prefix"]
        config = arguments["extra_param"]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path)
        records, prompts = load_prompts(Path(data_path), tokenizer, process_settings().coca, config.max_prompt_length)
        samples = arguments["train_valid_test_num_samples"][0]
        train = RecordPrompts(records, prompts, samples, arguments["seed"], not config.no_shuffle)
        return train, None, None

    return build_train_valid_test_datasets


def prompt_loader(original: Any) -> Any:
    """Wrap ``PromptDataLoader``: our data set is shuffled already."""

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
