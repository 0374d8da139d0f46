"""The mean log-prob of an answer against a plain forward pass."""

import numpy as np
import pytest
import torch

from benchmarks.long_answers import mean_answer_log_probs
from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(path, 0)
    return path


def prediction(number, response, confidence=0.5):
    question = f"{1000 + number}+2100"
    return Prediction(str(number), "sums", question, response, confidence, number % 2 == 0, 6, tokens=8, model="m")


def test_it_is_the_mean_over_the_answers_tokens(model):
    policy = load_policy(model, ModelConfig(), torch.device("cpu"))
    rows = [prediction(0, "<confidence>0.5</confidence>12"), prediction(1, "345", None), prediction(2, "", None)]
    found = mean_answer_log_probs(policy, rows)
    for row, answer, value in zip(rows, ("12", "345", ""), found, strict=True):
        if not answer:
            assert value == -np.inf
            continue
        chat = [{"role": "system", "content": CONFIDENCE_FIRST_PROMPT}, {"role": "user", "content": row.question}]
        prompt = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = policy.tokenizer(prompt + row.response, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probs = policy.sampling_logits(policy.model(ids).logits[0], 1.0).log_softmax(-1)
        places = range(ids.shape[1] - len(answer), ids.shape[1])  # the tiny model's digits are tokens
        expected = np.mean([float(log_probs[place - 1, ids[0, place]]) for place in places])
        assert value == pytest.approx(expected, abs=1e-5)
