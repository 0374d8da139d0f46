"""The built-in tiny model is an ordinary Hugging Face directory."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.load import load_policy
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


def test_prompt_and_response_of_one_token_a_character(tmp_path):
    write_tiny_model(tmp_path, seed=0)
    policy = load_policy(tmp_path, ModelConfig(), torch.device("cpu"))
    record = Record("a", "arithmetic", "math", "0012+0034", "64", metadata={"instruction": ""})
    (prompt,) = policy.encode_prompts([record], "State your confidence.")
    assert policy.tokenizer.convert_ids_to_tokens(prompt) == list("0012+0034=")
    assert sum(p.numel() for p in policy.model.parameters()) < 120_000
    response = "<confidence>0.83</confidence>64"
    ids = torch.tensor([[*policy.tokenizer(response, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]])
    assert policy.text.decode(ids, torch.tensor([ids.shape[1]])) == [response]
