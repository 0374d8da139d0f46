"""OpenCompass's output, in each of the shapes that it comes in."""

import json

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.opencompass.output import correctness, read_judgement, read_opencompass


@pytest.mark.parametrize(
    "result",
    [
        {"accuracy": 50.0, "details": [{"correct": True}, {"correct": False}]},
        {"score": 50.0, "details": {"1": {"is_correct": False}, "0": {"is_correct": True}}},
        {"details": {"10": {"cascade_correct": False}, "2": {"cascade_correct": True}}},
        {"accuracy": 100.0, "details": {"0": {"prediction": "A"}, "1": {"prediction": "NOT_ATTEMPTED"}}},
        {
            "accuracy": 50.0,
            "details": [{"example_abbr": "x_0", "correct": [True]}, {"example_abbr": "x_1", "correct": [False]}],
        },
    ],
    ids=["list", "dict", "cascade, in numeric order", "judge that counts the A of ATTEMPTED", "grouped"],
)
def test_shapes(result):
    assert correctness(result, 2, "x") == [True, False]


def test_a_judge_that_gives_no_verdict_is_refused_unless_it_is_rare():
    def said(undecided):
        words = ["A"] * (200 - undecided) + ["I cannot tell"] * undecided
        return {"details": {str(i): {"prediction": text} for i, text in enumerate(words)}}

    assert correctness(said(2), 200, "x") == [True] * 198 + [False] * 2
    with pytest.raises(DataError, match="no verdict on 3 of 200 samples; on sample 197 it said 'I cannot tell'"):
        correctness(said(3), 200, "x")


def test_the_final_verdict_of_a_cascade_counts():
    assert correctness({"details": [{"correct": False, "cascade_correct": True}]}, 1, "x") == [True]


def test_grouped_samples_come_replica_by_replica():
    details = [{"example_abbr": "x_0", "correct": [True, False]}, {"example_abbr": "x_1", "correct": [True, True]}]
    assert correctness({"details": details}, 4, "x") == [True, True, False, True]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"details": [{"correct": True}]}, "x: the evaluator graded 1 of 2 samples"),
        ({"accuracy": 50.0}, "x: the evaluator's result has no per-sample details, found NoneType"),
        ({"details": [{"pred": "1"}, {"pred": "2"}]}, "x, sample 0: says neither of cascade_correct, is_correct"),
        ({"error": "different length"}, "x: the evaluator failed: different length"),
        (
            {"accuracy": 100.0, "details": [{"correct": True}, {"correct": False}]},
            r"accuracy is 100\.0000, .* 50\.0000",
        ),
        ({"details": {"a": {"correct": True}, "b": {}}}, "details should be numbered, found key 'a'"),
    ],
)
def test_what_does_not_say_it_for_every_sample_is_refused(result, message):
    with pytest.raises(DataError, match=message):
        correctness(result, 2, "x")


@pytest.mark.parametrize("text", ["A", "a", "CORRECT", " Correct.", '"A"', "**CORRECT**", "A: CORRECT"])
def test_right(text):
    assert read_judgement(text) is True


@pytest.mark.parametrize(
    "text", ["B", "C", "INCORRECT", "NOT_ATTEMPTED", "not attempted", "C: NOT_ATTEMPTED", "INVALID"]
)
def test_wrong(text):
    assert read_judgement(text) is False


@pytest.mark.parametrize("text", ["", "Answer: it is right", "AB", "D", "NOT CORRECT"])
def test_no_verdict(text):
    assert read_judgement(text) is None


@pytest.fixture
def work_dir(tmp_path):
    rows = {
        str(i): {
            "origin_prompt": [{"role": "SYSTEM", "prompt": "s"}, {"role": "HUMAN", "prompt": f"question {i}"}],
            "prediction": f"<confidence>0.{i}</confidence> answer",
            "gold": i,
        }
        for i in range(12)
    }
    for folder, name, content in (
        ("predictions", "gsm8k", rows),
        ("results", "gsm8k", {"accuracy": 50.0, "details": [{"correct": i % 2 == 0} for i in range(12)]}),
        ("results", "gsm8k_replica0", {}),
    ):
        path = tmp_path / folder / "model" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return tmp_path


def test_predictions(work_dir):
    predictions = read_opencompass(work_dir, categories={"gsm8k": "math"})
    assert [p.id for p in predictions] == [str(i) for i in range(12)]
    assert [p.confidence for p in predictions[:3]] == [0.0, 0.1, 0.2]
    assert predictions[3].correct is False
    assert (predictions[3].question, predictions[3].gold) == ("question 3", "3")
    assert (predictions[3].model, predictions[3].category) == ("model", "math")


def test_external_confidence_wins(work_dir):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    rows = json.loads(path.read_text())
    rows["0"] |= {"confidence": 0.77, "tokens_to_confidence": 160}
    path.write_text(json.dumps(rows))
    first, second, *_ = read_opencompass(work_dir)
    assert (first.confidence, first.tokens_to_confidence) == (0.77, 160)
    assert second.confidence == 0.1


def test_split_predictions_are_joined_in_numeric_order(work_dir):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    rows = list(json.loads(path.read_text()).values())
    path.unlink()
    for i in range(12):
        path.with_name(f"gsm8k_{i}.json").write_text(json.dumps({"0": rows[i]}))
    assert [p.gold for p in read_opencompass(work_dir)] == [str(i) for i in range(12)]


def test_missing_files_are_refused(work_dir, tmp_path):
    (work_dir / "predictions" / "model" / "gsm8k.json").unlink()
    with pytest.raises(DataError, match=r"gsm8k\.json: is missing"):
        read_opencompass(work_dir)
    with pytest.raises(DataError, match=r"holds no results/MODEL/DATASET\.json"):
        read_opencompass(tmp_path / "elsewhere")
