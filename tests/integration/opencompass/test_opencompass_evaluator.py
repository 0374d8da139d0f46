"""The wrapper around OpenCompass's evaluators, on the traps that were met."""

import json

import numpy as np
import pytest
from datasets import Dataset
from opencompass.datasets import MATHEvaluator
from opencompass.evaluator import MATHVerifyEvaluator

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.opencompass import config as configuration
from coca_mindspeed.evaluation.opencompass.evaluator import (
    ConfidenceEvaluator,
    SandboxedHumanEvalEvaluator,
    SandboxedMBPPEvaluator,
)

MATH = {"type": f"{MATHEvaluator.__module__}.{MATHEvaluator.__name__}", "version": "v2"}
VERIFY = {"type": f"{MATHVerifyEvaluator.__module__}.{MATHVerifyEvaluator.__name__}"}


def score(evaluator, predictions, references, n=1, **columns):
    questions = Dataset.from_list([{"answer": r, "subdivision": "x", "idx": i} for i, r in enumerate(references)])
    return evaluator.evaluate(
        1, n, questions, predictions=predictions, references=references, test_set=questions, **columns
    )


def test_a_gold_answer_that_does_not_parse_raises():
    evaluator = ConfidenceEvaluator(VERIFY)
    replies = [f"<confidence>0.{i}</confidence> \\boxed{{{i}}}" for i in range(1, 4)]
    with pytest.raises(DataError, match="graded 2 of 3 samples"):
        score(evaluator, replies, ["1", "", "3"])


def test_samples_of_a_question_are_pooled():
    replies = ["<confidence>0.9</confidence>1", "<confidence>0.8</confidence>7"]
    replies += ["<confidence>0.4</confidence>0", "<confidence>0.1</confidence>2"]
    result = score(ConfidenceEvaluator(MATH, question_column="subdivision"), replies, ["1", "2", "1", "2"], n=2)
    pooled = calibration_metrics(np.array([0.9, 0.8, 0.4, 0.1]), np.array([True, False, False, True]))
    assert result["auroc"] == pytest.approx(pooled.values["auroc"])
    assert result["ece"] == pytest.approx(pooled.values["ece"])
    assert result["accuracy"] == 50
    rows = [(row["id"], row["sample"], row["question"], row["gold"]) for row in result["details"]]
    assert rows == [("0", 0, "x", "1"), ("1", 0, "x", "2"), ("0", 1, "x", "1"), ("1", 1, "x", "2")]


@pytest.mark.parametrize(
    ("position", "confidences"),
    [
        ("first", [(None, None), (0.2, None)]),
        ("last", [(0.9, None), (None, None)]),
        ("both", [(None, 0.9), (0.2, None)]),
    ],
)
def test_positions(position, confidences):
    evaluator = ConfidenceEvaluator(MATH, position=position)
    result = score(evaluator, ["1 <confidence>0.9</confidence>", "<confidence>0.2</confidence> 3"], ["1", "2"])
    assert [(row["confidence"], row["confidence_after"]) for row in result["details"]] == confidences
    assert result["success_rate"] == 50
    assert np.isnan(result["auroc"])  # of one answer
    assert np.isnan(result["tokens_to_confidence"])


def test_several_responses_in_one_prediction_are_refused():
    with pytest.raises(DataError, match="num_return_sequences"):
        score(ConfidenceEvaluator(MATH), [["1", "2"]], ["1"])


def test_mbpp_programs_run_in_the_sandbox(tmp_path):
    target = tmp_path / "written_by_the_program"
    programs = [
        "```python\ndef f(x):\n    return x\n```",
        f"```python\nopen({str(target)!r}, 'w').write('x')\ndef f(x):\n    return x\n```",
        "```python\nimport os\nos._exit(0)\n```",
        "```python\ndef f(x):\n    return True if x == 1 else x\n```",
    ]
    result = SandboxedMBPPEvaluator().score(programs, ["assert f(1) == 1\nassert f(2) == 2"] * 4)
    # The last returns True for 1: OpenCompass compares types as well.
    assert [row["correct"] for row in result["details"]] == [True, False, False, False]
    assert not target.exists()


def test_humaneval_takes_a_whole_function_or_the_rest_of_it():
    question = {
        "prompt": 'from typing import List\n\ndef f(x: List[int]) -> int:\n    """Sum."""\n',
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
    }
    answers = ["return sum(x)", "def f(x: List[int]) -> int:\n    return sum(x)", "return 0"]
    result = SandboxedHumanEvalEvaluator().score(answers, ["HumanEval/0"] * 3, Dataset.from_list([question] * 3))
    assert [row["correct"] for row in result["details"]] == [True, True, False]


def test_configuration_moves_the_postprocessor_inside_and_drops_lengths():
    stock = configuration.stock_dataset("triviaqa")
    assert stock["infer_cfg"]["inferencer"]["max_out_len"] == 50
    wrapped = configuration.with_confidence(stock)
    assert "max_out_len" not in wrapped["infer_cfg"]["inferencer"]
    rounds = wrapped["infer_cfg"]["prompt_template"]["template"]["round"]
    assert [turn["role"] for turn in rounds] == ["HUMAN"]  # the stock one begins the answer with "A:"
    assert stock["infer_cfg"]["inferencer"]["max_out_len"] == 50
    gsm8k = configuration.with_confidence(configuration.stock_dataset("gsm8k"))["eval_cfg"]
    assert "pred_postprocessor" not in gsm8k
    assert gsm8k["evaluator"]["answer_postprocessor"]["type"].endswith("math_postprocess_v2")
    assert gsm8k["dataset_postprocessor"]


def test_few_shot_data_sets_are_refused():
    few_shot = configuration.stock_dataset("gsm8k")
    few_shot["infer_cfg"]["ice_template"] = {}
    with pytest.raises(ConfigError, match="data set gsm8k: "):
        configuration.with_confidence(few_shot)


def test_command_writes_a_configuration(tmp_path, capsys):
    common = ["--model", "coca-7b", "--api-base", "http://127.0.0.1:1/v1", "--tokenizer", str(tmp_path)]
    path = tmp_path / "run.json"
    assert configuration.main([*common, "--output", str(path)]) == 1
    assert "is graded by a judge" in capsys.readouterr().err
    assert configuration.main([*common, "--judge", "judge", "--samples", "4", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {d["abbr"]: d["n"] for d in written["datasets"]} == dict.fromkeys(configuration.STOCK, 4)
    assert written["models"][0]["temperature"] == 1.0
    assert written["datasets"][6]["eval_cfg"]["evaluator"]["evaluator"]["judge_cfg"]["temperature"] == 0.0
