"""The built-in tiny model is an ordinary Hugging Face directory."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed.local.tiny_model import write_tiny_model


def test_generate_takes_what_the_saved_tokenizer_returns(tmp_path):
    write_tiny_model(tmp_path, seed=0)
    # A trained model is saved with the tokenizer as it was loaded.
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = tokenizer(["1+2=", "12+34="], padding=True, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 2
    assert torch.equal(generated[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
