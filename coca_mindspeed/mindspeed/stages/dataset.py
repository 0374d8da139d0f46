"""The data set of a run: prompts of its records, in an order of their own in each epoch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.data.order import QuestionOrder
from coca_mindspeed.data.records import Record
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.start.records import load_prompts, run_records

RECORD = "coca_record"  # column of the dock, int32 [1]: index of the question's record; comes with the prompts


def question_order(records: Sequence[Record], config: Any) -> QuestionOrder:
    """The order of a run's questions; ``config`` is MindSpeed-RL's configuration of the actor."""

    def order_of(epoch: int) -> NDArray[np.int64]:
        size = len(records)
        return np.arange(size) if config.no_shuffle else np.random.default_rng((config.seed, epoch)).permutation(size)

    return QuestionOrder(records, config.global_batch_size, order_of)


class RecordPrompts:
    """A data set of ``samples`` prompts in the order of a run's questions; ``prompts`` are of its records."""

    def __init__(self, order: QuestionOrder, prompts: Sequence[NDArray[np.int32]], samples: int) -> None:
        self._prompts, self._indexes = prompts, order.indexes(range(samples))

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = int(self._indexes[position])
        return {"input_ids": np.asarray(self._prompts[index], dtype=np.int64), RECORD: np.array([index])}


def record_datasets(_original: Any) -> Any:
    """Replace ``build_train_valid_test_datasets``: the training set is a file of records."""

    def build_train_valid_test_datasets(**arguments: Any) -> Any:
        (data_path,) = arguments["data_prefix"]
        config = arguments["extra_param"]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name_or_path)
        prompts = load_prompts(data_path, tokenizer, process_settings().coca, config.max_prompt_length)
        samples = arguments["train_valid_test_num_samples"][0]
        return RecordPrompts(question_order(run_records(data_path), config), prompts, samples), None, None

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
