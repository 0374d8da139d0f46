"""The data set of a run: prompts of its records, shuffled by epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.data.records import Record
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.start.records import load_prompts
from coca_mindspeed.scoring.metrics import FirstSight

RECORD = "coca_record"  # column of the dock, int32 [1]: index of the question's record; comes with the prompts


#: The questions of this process's run in the order in which it asks them; empty: not a set of records.
asked: list[str] = []


def set_asked(questions: Sequence[str]) -> None:
    """Set :data:`asked`, also from a hook's function: Ray pickles that by value with a copy of each global it names."""
    asked[:] = questions


def seen_before(step: int, count: int) -> tuple[list[bool], float] | None:
    """Whether the run asked each of the ``count`` questions of iteration ``step`` (from 1) before; None: unknown.

    The second value is :meth:`.FirstSight.times_asked`.
    """
    if not asked:
        return None
    sights, questions = FirstSight.of(asked, count), asked[(step - 1) * count : step * count]
    return sights.seen(questions, step - 1), sights.times_asked(step - 1)


class RecordPrompts:
    """A data set of ``samples`` prompts; each epoch is a permutation of all records, drawn from seed and epoch."""

    def __init__(
        self, records: Sequence[Record], prompts: Sequence[NDArray[np.int32]], samples: int, seed: int, shuffle: bool
    ) -> None:
        self._records, self._prompts = records, prompts
        self._order = np.concatenate(
            [
                np.random.default_rng((seed, epoch)).permutation(len(records)) if shuffle else np.arange(len(records))
                for epoch in range(-(-samples // len(records)))
            ]
        )[:samples]

    def __len__(self) -> int:
        return len(self._order)

    def questions(self) -> list[str]:
        """The question at each position."""
        return [self._records[index].question for index in self._order]

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = int(self._order[position])
        return {"input_ids": np.asarray(self._prompts[index], dtype=np.int64), RECORD: np.array([index])}


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
        set_asked(train.questions())
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
