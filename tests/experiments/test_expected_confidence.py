import json

import numpy as np
import pytest
import torch

from coca_mindspeed import cli
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import write_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.tiny_model import write_tiny_model
from experiments.__main__ import main
from experiments.expected_confidence.__main__ import table


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def tiny_policy(tiny_directory):
    run = compose_run("demo", [f"model.path={tiny_directory}", "model.compute_dtype=float32"]).run
    return load_policy(tiny_directory, run.model, torch.device("cpu"))


def figures(text):
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[4:]]
    return {name: [float(value) for value in values] for name, *values in rows}


def test_the_expectation_ranks_what_draws_hide():
    """Two values: the right question states .9 with probability .6, the wrong one with .4."""
    values, probabilities = np.array([0.1, 0.9]), np.array([[0.4, 0.6], [0.6, 0.4]])
    found = figures(table(values, np.repeat(probabilities, 500, axis=0), np.repeat([True, False], 500)))
    # One draw: P(higher) + P(equal)/2 = .6 * .6 + .48 / 2.
    assert found["one draw"][1] == pytest.approx(0.6, abs=0.01)
    assert found["one draw"][0] == pytest.approx(0.5, abs=0.01)
    assert found["one draw"][1] < found["mean of 4"][1] < found["mean of 16"][1] < found["expectation"][1] == 1.0
    # Expectations are .58 and .42: the calibration error is .42 for both halves.
    assert found["expectation"][2] == pytest.approx(0.42)


def test_the_command_writes_a_row_for_each_question(tmp_path, capsys):
    """Warmed up for a moment: an untrained model states no confidence."""
    keys = ["rollout.max_new_tokens=16", "rollout.max_prompt_tokens=64", "data.grader=exact"]
    warm_up = [
        "warm_up.steps=120",
        "warm_up.batch=16",
        "trainer.steps=1",
        "evaluation.final_questions=0",
        "evaluation.preflight=0",
        "checkpoint.interval=0",
    ]
    assert cli.main(["train", "demo", *warm_up, "--output", str(tmp_path / "run"), "--quiet"]) == 0
    write_records(tmp_path / "records.jsonl", arithmetic_records(6, "evaluate", 0))
    output = tmp_path / "rows.jsonl"
    arguments = [str(tmp_path / "run" / "model"), str(tmp_path / "records.jsonl"), "--output", str(output)]
    assert main(["expected_confidence", *arguments, *keys]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 6
    assert all(0 < row["expectation"] < 1 for row in rows)
    assert "6 questions" in capsys.readouterr().out
    assert main(["expected_confidence", *arguments, *keys, "rollout.max_prompt_tokens=2"]) == 1
    assert "rollout.max_prompt_tokens" in capsys.readouterr().err
