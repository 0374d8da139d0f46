"""MindSpeed-RL's own preprocess_data.py packs our export, and the packed ids are the chat template's, token for token.

The expected ids come from the tokenizer's own chat template, and the packed ones are read from the index and data
files here, so neither side of the comparison is the code under test.
"""

import struct

import numpy as np
import pytest

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.cli import main
from coca_mindspeed.data.prepare.filters import load_tokenizer
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, write_records
from tests.data.tokenizers import save_tokenizer
from tests.integration.mindspeed_rl_home import needs_mindspeed_rl, preprocess_data

pytestmark = [needs_mindspeed_rl, pytest.mark.slow]

_HEADER = b"MMIDIDX\x00\x00"


def packed(prefix, column):
    """The sequences of a packed column: Megatron's index (version 1) and data files."""
    index = prefix.with_name(f"{prefix.name}_packed_{column}_document.idx").read_bytes()
    version, dtype, sequences, _documents = struct.unpack_from("<QBQQ", index, len(_HEADER))
    assert index.startswith(_HEADER)
    assert (version, dtype) == (1, 4)  # 4: int32
    start = len(_HEADER) + struct.calcsize("<QBQQ")
    lengths = np.frombuffer(index, np.int32, sequences, start)
    offsets = np.frombuffer(index, np.int64, sequences, start + lengths.nbytes)
    data = prefix.with_name(f"{prefix.name}_packed_{column}_document.bin").read_bytes()
    return [np.frombuffer(data, np.int32, n, o).tolist() for n, o in zip(lengths, offsets, strict=True)]


MATH = [
    Record("a", "big_math", "math", "What is $\\frac{1}{2} + \\frac12$?", "1"),
    Record("b", "big_math", "math", " Find x > 3\n\nso that x \\le 数学 12345.\n", "\\frac{5}{6}"),
    Record("c", "big_math", "math", 'She said "{{content}}" <|im_end|> and <|eot_id|> left. ünï 🙂', "-10^{3}"),
]
MIXED = [
    *MATH,
    Record("d", "own", "math", "Read n.\nHalve n.", "n/2", None, {"instruction": "\n\nGive it as:\n```\nm/n\n```"}),
    Record("e", "own", "math", "Who?", "(1, 2)", None, {"instruction": ""}),
    Record("f", "own", "math", "One?", "1", "You are terse.\nVery."),
]


@pytest.mark.parametrize(
    ("family", "records"),
    [("qwen", MATH), ("llama3", MATH), ("llama3", MIXED)],
    ids=["qwen-math", "llama3-math", "llama3-mixed"],
)
def test_packed_prompts_equal_the_chat_template(tmp_path, family, records):
    write_records(tmp_path / "train.jsonl", records)
    directory = save_tokenizer(family, tmp_path / "tokenizer")
    arguments = ("data", "export", "mindspeed-rl", "--input", tmp_path / "train.jsonl", "--output", tmp_path / "out")
    options = ("--template", family, "--tokenizer", directory, "--workers", 1)
    assert main([str(argument) for argument in (*arguments, *options)]) == 0

    preprocess_data("dataset", "--config-dir", str(tmp_path / "out"), directory=tmp_path)

    tokenizer = load_tokenizer(directory)
    expected = [
        tokenizer.apply_chat_template(
            prompt_messages(record, CONFIDENCE_FIRST_PROMPT), add_generation_prompt=True, tokenize=True
        )
        for record in records
    ]
    prefix = tmp_path / "out" / "packed" / "coca"
    assert packed(prefix, "input_ids") == expected
    assert packed(prefix, "attention_mask") == [[1] * len(ids) for ids in expected]
    labels = [tokenizer.decode(ids) for ids in packed(prefix, "labels")]
    assert labels == [record.answer for record in records]
