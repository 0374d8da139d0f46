"""The engine with SmolLM2's own tokenizer and template, on a small model of its shape: 9 heads, 3 key/value heads."""

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.boundary import confidence_segment_lengths
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.utils.tokenization import _byte_level, token_text
from tests.algorithm.test_boundary import brute_force
from tests.real_model import needs_smollm2, smollm2_tokenizer

pytestmark = [needs_smollm2, pytest.mark.published]


_PIECES = ["<confidence>", " 0.83 ", "0.5", "</confidence>", " ", "\n", " The answer is 42.", "数学", "🙂", ">\n", "</"]
_SPACE = ["", " ", "\n"]


@pytest.mark.parametrize("position", ["first", "last"])
def test_the_boundary_is_found_on_the_tokens_that_the_tokenizer_makes(position):
    """Of three hundred texts at once: the table of 49,152 tokens is made once."""
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(_PIECES, size=random.integers(8))) for _ in range(250)]
    texts += [f"<confidence>{a}0.5{b}</confidence>{c}" for a in _SPACE for b in _SPACE for c in (*_SPACE, "7", "数")]
    rows = smollm2_tokenizer()(texts, add_special_tokens=False)["input_ids"]
    # The texts hold no special tokens, so each token's bytes are those of its letters.
    table = [_byte_level(token) for token in smollm2_tokenizer().convert_ids_to_tokens(range(49_152))]
    parser, text = ResponseParser(position), token_text(smollm2_tokenizer(), 49_152)
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor(row, dtype=torch.int64)
    assert text.decode(ids, lengths) == texts
    valid = torch.tensor([parser(text).confidence is not None for text in texts])
    assert 10 < valid.sum() < len(texts)
    found = confidence_segment_lengths(ids, lengths, text, valid, max_confidence_tokens=16, position=position)
    assert found.tolist() == [brute_force(row, table, parser, 16) for row in rows]
