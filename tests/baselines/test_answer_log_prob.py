"""The mean log-prob of an answer against a plain forward pass, and as a router of two tiers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.baselines.probabilities import mean_answer_log_probs
from coca_mindspeed.cli import main
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
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
            log_probs = policy.logits_of_policy(policy.model(ids).logits[0], 1.0).log_softmax(-1)
        places = range(ids.shape[1] - len(answer), ids.shape[1])  # the tiny model's digits are tokens
        expected = np.mean([float(log_probs[place - 1, ids[0, place]]) for place in places])
        assert value == pytest.approx(expected, abs=1e-5)


def test_the_router_pays_for_the_answer_and_for_no_confidence(model, tmp_path, capsys):
    small = [prediction(i, f"<confidence>0.{i % 9}</confidence>{i}", i % 9 / 10) for i in range(40)]
    files = [tmp_path / "small.jsonl", tmp_path / "large.jsonl"]
    write_predictions(files[0], small)
    write_predictions(files[1], [replace(p, correct=True) for p in small])
    command = ["route", *map(str, files), "--output", str(tmp_path / "out"), "--replicates", "5"]
    assert main([*command, "--log-probs", str(model)]) == 0
    found = json.loads((tmp_path / "out" / "route.json").read_text())
    [name] = [name for name in found["routers"] if "log-prob" in name]
    assert min(found["routers"][name]["cost"]) == pytest.approx(2.0)  # 8 tokens less the confidence's 6
    assert set(found["auroc"]) == {"stated confidence", "mean log-prob of the answer"}
    third = tmp_path / "third.jsonl"
    write_predictions(third, small)
    assert main(["route", *map(str, [*files, third]), "--log-probs", str(model), "--output", str(tmp_path)]) == 2
