"""The engine with SmolLM2's own tokenizer and template, on a small model of its shape: 9 heads, 3 key/value heads."""

from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_mindspeed.algorithm.boundary import confidence_segment_lengths
from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT, ResponseParser
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_mindspeed.scoring.rollout import Rollout
from coca_mindspeed.utils.tokenization import _byte_level, token_text
from experiments.real_world.families import real_world_records
from tests.algorithm.test_boundary import brute_force
from tests.real_model import needs_smollm2, smollm2_tokenizer

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "smollm2_shape"
    tokenizer = smollm2_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 72, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, tie_word_embeddings=True, **sizes, **heads)).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return load_policy(directory, ModelConfig(), torch.device("cpu"))


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


def test_a_response_is_scored_as_it_is_written():
    tokenizer = smollm2_tokenizer()
    record = next(r for r in real_world_records("train", 20) if r.dataset == "additions")
    texts = [f"<confidence> 0.83 </confidence> {record.answer}", "<confidence> 0.50 </confidence> no", record.answer]
    rows = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((3, int(lengths.max())), tokenizer.pad_token_id)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    with closing(build_grader("auto")) as grader:
        score = ResponseScorer(token_text(tokenizer, 49_152), ResponseParser("first", 2), grader, 6)
        scored = score(Rollout(group_size=3, lengths=lengths, width=ids.shape[1], records=[record], token_ids=ids))
    assert scored.texts == texts  # <|im_end|> has no text
    assert scored.stated.nan_to_num(-1).tolist() == [[0.83, 0.5, -1]]
    assert scored.correct.tolist() == [[True, False, True]]
    tag = tokenizer.encode("<confidence> 0.83 </confidence>", add_special_tokens=False)
    assert scored.confidence_lengths[:2].tolist() == [len(tag)] * 2


def test_prompts_are_laid_out_by_the_files_own_template(policy):
    records = real_world_records("train", 2)
    for record, ids in zip(records, policy.encode_prompts(records, CONFIDENCE_FIRST_PROMPT), strict=True):
        text = policy.tokenizer.decode(ids)
        assert text.startswith(f"<|im_start|>system\n{CONFIDENCE_FIRST_PROMPT}<|im_end|>\n<|im_start|>user\n")
        assert record.question in text
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
