"""Readings of a confidence, against logits of whole strings."""

import json

import pytest
import torch

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import reading_metrics
from coca_mindspeed.evaluation.predictions import confidence_mass, read_predictions
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import Numbers, read_confidences
from coca_mindspeed.local.tiny_model import write_tiny_model
from tests.local.runs_for_tests import small_session


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, seed=0)
    run = compose_run("demo", [f"model.path={directory}", "model.compute_dtype=float32"]).run
    return load_policy(directory, run.model, torch.device("cpu"))


def whole_strings(policy, prompt, rows):
    """Log-prob of each row of tokens, by a forward pass of its own."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1]
        log_probs = policy.sampling_logits(logits, 1.0).log_softmax(-1)
        found.append(float(log_probs.gather(1, torch.tensor(row)[:, None]).double().sum()))
    return torch.tensor(found, dtype=torch.float64)


def greedy_number(policy, prompt, numbers):
    """The number of the most probable token after token, among beginnings of the numbers."""
    path = ()
    while path not in numbers.token_ids:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *path]])).logits[0, -1]
        following = sorted({row[len(path)] for row in numbers.token_ids if row[: len(path)] == path})
        path = (*path, max(following, key=lambda token: float(logits[token])))
    return numbers.token_ids.index(path)


@pytest.mark.parametrize("decimals", [1, 2, None])
def test_the_trie_gives_the_probabilities_of_whole_strings(policy, decimals):
    numbers = Numbers.of(policy, ["<confidence>0.5</confidence>4", "<confidence>0.7</confidence>", "4"], decimals)
    assert len(numbers.values) == {1: 11, 2: 101, None: 114}[decimals]
    prompts = policy.encode_prompts(arithmetic_records(3, "train", 0), "")
    log_probs, greedy = numbers.log_probs(policy, prompts)
    for prompt, found, number in zip(prompts, log_probs, greedy.tolist(), strict=True):
        torch.testing.assert_close(found, whole_strings(policy, prompt, numbers.token_ids), rtol=1e-4, atol=1e-4)
        assert number == greedy_number(policy, prompt, numbers)
    mass = log_probs.exp().sum(1)
    expected = (log_probs.softmax(1) @ torch.tensor(numbers.values, dtype=torch.float64)).tolist()
    for rows in (1, 1000):
        readings = read_confidences(policy, prompts, numbers, rows)
        assert [r.expectation for r in readings] == pytest.approx(expected, rel=1e-4)
        assert [r.mass for r in readings] == pytest.approx(mass.tolist(), rel=1e-4)
    assert Numbers.of(policy, ["no confidence"], decimals) is None


def test_a_run_evaluates_several_samples_and_readings(tmp_path):
    keys = ("warm_up.steps=120", "evaluation.interval=1", "evaluation.samples=3", "evaluation.readings=true")
    sizes = ("trainer.steps=1", "data.evaluate_size=7", "evaluation.questions=7", "rollout.batch_responses=7")
    opened = small_session(tmp_path / "run", *keys, *sizes)
    opened.trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        found = read_predictions(tmp_path / "run" / "evaluations" / f"step_{row['step']:06d}.jsonl")
        assert [p.sample for p in found] == [0, 1, 2] * 7
        assert len({p.id for p in found}) == 7
        assert row["eval/confidence_mass"] == pytest.approx(confidence_mass(found))
        if row["eval/confidence_mass"] >= 0.95:
            assert row["eval/ece_expectation"] == pytest.approx(reading_metrics(found)["expectation"]["ece"])
    assert max(row["eval/confidence_mass"] for row in rows) > 0.5


@pytest.mark.parametrize("override", ["method=rlcr", "method.confidence_decimals=4"])
def test_readings_that_cannot_be_computed_are_refused(override):
    with pytest.raises(ConfigError) as refused:
        compose_run("demo", ["evaluation.readings=true", override])
    assert [problem.key for problem in refused.value.problems] == ["evaluation.readings"]
