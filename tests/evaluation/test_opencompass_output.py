"""Verdicts of OpenCompass's evaluators, in each of the shapes that they come in, and the results of a run."""

import json
from contextlib import nullcontext

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.adapters import correctness, read_judgement, read_opencompass


def judged(undecided):
    words = ["A"] * (200 - undecided) + ["I cannot tell"] * undecided
    return {"details": {str(i): {"prediction": text} for i, text in enumerate(words)}}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"accuracy": 50.0, "details": [{"correct": True}, {"correct": False}]}, [True, False]),
        ({"score": 50.0, "details": {"1": {"is_correct": False}, "0": {"is_correct": True}}}, [True, False]),
        ({"details": {"10": {"cascade_correct": False}, "2": {"cascade_correct": True}}}, [True, False]),
        ({"details": [{"correct": False, "cascade_correct": True}]}, [True]),
        # A judge's total counts the A of NOT_ATTEMPTED.
        ({"accuracy": 100.0, "details": [{"prediction": "A"}, {"llm_judge": "NOT_ATTEMPTED"}]}, [True, False]),
        (judged(2), [True] * 198 + [False] * 2),
    ],
)
def test_verdicts(result, expected):
    assert correctness(result, len(expected), "x") == expected


@pytest.mark.parametrize(
    ("result", "count", "message"),
    [
        ({"details": [{"correct": True}]}, 2, "x: .*1 of 2"),
        ({"accuracy": 50.0}, 2, "x: .*0 of 2"),
        ({"details": [{"pred": "1"}, {"pred": "2"}]}, 2, "x, sample 0: .*cascade_correct"),
        ({"error": "different length"}, 2, "x: .*different length"),
        ({"accuracy": 100.0, "details": [{"correct": True}, {"correct": False}]}, 2, r"100\.0000, .* 50\.0000"),
        ({"details": {"a": {"correct": True}, "b": {}}}, 2, "'a'"),
        (judged(3), 200, r"3 of 200 .*197"),
    ],
)
def test_a_result_without_a_verdict_on_each_sample_is_refused(result, count, message):
    with pytest.raises(DataError, match=message):
        correctness(result, count, "x")


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        (["A", "a", "CORRECT", " Correct.", '"A"', "**CORRECT**", "A: CORRECT"], True),
        (["B", "C", "INCORRECT", "NOT_ATTEMPTED", "not attempted", "C: NOT_ATTEMPTED", "INVALID"], False),
        (["", "Answer: it is right", "AB", "D", "NOT CORRECT"], None),
    ],
)
def test_judgements(texts, verdict):
    assert {text: read_judgement(text) for text in texts} == dict.fromkeys(texts, verdict)


ROW = {
    **{"id": "3", "sample": 1, "question": "q", "gold": "7", "response": "<confidence>0.3</confidence> 7"},
    **{"confidence": 0.3, "confidence_after": None, "correct": True, "tokens_to_confidence": None},
}


def write(folder, name, content):
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) if not isinstance(content, str) else content)


def test_predictions_are_read_from_our_evaluators_details(tmp_path):
    write(tmp_path / "results" / "m", "gsm8k", {"accuracy": 100.0, "details": [ROW]})
    write(tmp_path / "results" / "m", "gsm8k_replica0", {})
    [p] = read_opencompass(tmp_path)
    found = (p.id, p.sample, p.dataset, p.model, p.gold, p.confidence, p.correct)
    assert found == ("3", 1, "gsm8k", "m", "7", 0.3, True)


@pytest.mark.parametrize(
    "content", ["{", "[1]", {"error": "x"}, {"details": [{"correct": True}]}, {"details": [ROW | {"confidence": 7}]}]
)
def test_other_results_are_refused(content, tmp_path):
    write(tmp_path / "results" / "m", "gsm8k", content)
    with pytest.raises(DataError, match=r"gsm8k\.json"):
        read_opencompass(tmp_path)


@pytest.mark.parametrize(
    ("predictions", "results", "refused"),
    [
        (["m/gsm8k"], [], "results/MODEL/DATASET"),
        # OpenCompass writes no results file where an evaluator fails.
        (["m/gsm8k", "m/math500"], ["m/gsm8k"], "math500"),
        (["m/gsm8k", "other/gsm8k"], ["m/gsm8k"], "other/gsm8k"),
        (["m/gsm8k", "m/tmp_aime24"], ["m/gsm8k"], "aime24"),  # left by an inference that was stopped
        (["m/tmp_aime24", "m/aime24"], ["m/aime24"], None),  # continued to its end
        (["m/gsm8k_0", "m/gsm8k_1"], ["m/gsm8k"], None),  # parts of a large data set
        (["m/gsm8k", "m/gsm8k_2"], ["m/gsm8k"], "gsm8k_2"),  # another data set with a name like that of a part
        (["m/gsm8k_2", "m/gsm8k_0_shot"], ["m/gsm8k_2", "m/gsm8k_0_shot"], None),
    ],
)
def test_files_of_a_run(tmp_path, predictions, results, refused):
    for folder, names in (("predictions", predictions), ("results", results)):
        for name in names:
            write(tmp_path / folder, name, {"details": [ROW]})
    with pytest.raises(DataError, match=refused) if refused else nullcontext():
        assert {f"{p.model}/{p.dataset}" for p in read_opencompass(tmp_path)} == set(results)
