"""The data set that MindSpeed-RL trains on: prompts of the run's records, in the order of its iterations."""

import copy
import json
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.mindspeed.stages import dataset
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.records import load_prompts, read_record_file, take_files
from tests.tokenizers_for_tests import THINKING_TEMPLATE, qwen_like


def test_prompts_have_the_runs_variables_and_date(tmp_path):
    """In the training's data set and in the validation's, whatever day it is."""
    (tmp_path / "records.jsonl").write_text(json.dumps({"id": "0", "question": "q", "answer": "1"}) + "\n")
    tokenizer = copy.deepcopy(qwen_like())
    tokenizer.chat_template = "{{ strftime_now('%d.%m.%Y') }}" + THINKING_TEMPLATE
    settings = CocaSettings.model_validate({"chat_template_kwargs": {"thinking": "off"}, "prompt_date": "2024-07-05"})
    for _ in range(2):  # the validation may be given the tokenizer that the data set was made with
        take_files({"records.jsonl": read_record_file(tmp_path / "records.jsonl")})
        [ids] = load_prompts("records.jsonl", tokenizer, settings, 4096)
        text = tokenizer.decode(ids)
        assert text.startswith("05.07.2024")
        assert "<think>" not in text


def _record(index: int) -> Record:
    return Record(id=str(index), dataset="d", category="math", question=f"q{index}", answer="1")


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_data_set_shows_each_iteration_its_questions(monkeypatch, shuffle):
    """Also if Ray has pickled the hook: a function that is made in a function is pickled with copies of its globals."""
    records, prompts = [_record(i) for i in range(5)], [np.array([7 * i], dtype=np.int32) for i in range(5)]
    monkeypatch.setattr(dataset, "process_settings", lambda: SimpleNamespace(coca=None))
    monkeypatch.setattr(dataset, "load_prompts", lambda *_: prompts)
    monkeypatch.setattr(dataset, "run_records", lambda _: records)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: None)
    config = SimpleNamespace(
        **{"tokenizer_name_or_path": "", "max_prompt_length": 8, "seed": 3},
        **{"no_shuffle": not shuffle, "global_batch_size": 4},
    )
    order = dataset.question_order(records, config)
    build = cloudpickle.loads(cloudpickle.dumps(dataset.record_datasets(None)))
    for samples in (12, 4):  # a run that is prolonged goes on in the same order
        shown, *_ = build(
            data_prefix=["train.jsonl"], extra_param=config, train_valid_test_num_samples=[samples], seed=3
        )
        asked = [int(shown[position][RECORD][0]) for position in range(len(shown))]
        assert asked == [int(record.id) for step in range(samples // 4) for record in order.of_step(step)]
        tokens = [shown[position]["input_ids"].tolist() for position in range(samples)]
        assert tokens == [[7 * index] for index in asked]
