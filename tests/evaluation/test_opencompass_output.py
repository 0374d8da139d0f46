"""OpenCompass's output, in each of the shapes that it comes in."""

import json

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.opencompass.output import correctness, read_judgement, read_opencompass

GROUPED = [{"example_abbr": "x_0", "correct": [True, False]}, {"example_abbr": "x_1", "correct": [True, True]}]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"accuracy": 50.0, "details": [{"correct": True}, {"correct": False}]}, [True, False]),
        ({"score": 50.0, "details": {"1": {"is_correct": False}, "0": {"is_correct": True}}}, [True, False]),
        ({"details": {"10": {"cascade_correct": False}, "2": {"cascade_correct": True}}}, [True, False]),
        ({"details": [{"correct": False, "cascade_correct": True}]}, [True]),
        # A judge's total counts the A of NOT_ATTEMPTED.
        (
            {"accuracy": 100.0, "details": {"0": {"prediction": "A"}, "1": {"prediction": "NOT_ATTEMPTED"}}},
            [True, False],
        ),
        ({"details": GROUPED}, [True, True, False, True]),  # replica by replica
    ],
)
def test_shapes(result, expected):
    assert correctness(result, len(expected), "x") == expected


def test_a_judge_that_gives_no_verdict_is_refused_unless_it_is_rare():
    def said(undecided):
        words = ["A"] * (200 - undecided) + ["I cannot tell"] * undecided
        return {"details": {str(i): {"prediction": text} for i, text in enumerate(words)}}

    assert correctness(said(2), 200, "x") == [True] * 198 + [False] * 2
    with pytest.raises(DataError, match=r"3 of 200 .*197 .*'I cannot tell'"):
        correctness(said(3), 200, "x")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"details": [{"correct": True}]}, "x: .*1 of 2"),
        ({"accuracy": 50.0}, "x: .*NoneType"),
        ({"details": [{"pred": "1"}, {"pred": "2"}]}, "x, sample 0: .*cascade_correct"),
        ({"error": "different length"}, "x: .*different length"),
        (
            {"accuracy": 100.0, "details": [{"correct": True}, {"correct": False}]},
            r"accuracy is 100\.0000, .* 50\.0000",
        ),
        ({"details": {"a": {"correct": True}, "b": {}}}, "'a'"),
    ],
)
def test_what_does_not_say_it_for_every_sample_is_refused(result, message):
    with pytest.raises(DataError, match=message):
        correctness(result, 2, "x")


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


def edited(work_dir, number, changes):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    rows = json.loads(path.read_text())
    rows[number] |= changes
    path.write_text(json.dumps({n: {k: v for k, v in row.items() if v != "removed"} for n, row in rows.items() if row}))
    return read_opencompass(work_dir)


def test_external_confidence_wins(work_dir):
    first, second, *_ = edited(work_dir, "0", {"confidence": 0.77, "tokens_to_confidence": 160})
    assert (first.confidence, first.tokens_to_confidence, second.confidence) == (0.77, 160, 0.1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"confidence": 85}, r"gsm8k\.json, sample 3: .*'confidence'"),
        ({"confidence": 0.5, "tokens_to_confidence": -1}, "'tokens_to_confidence'"),
        ({"prediction": "removed"}, r"gsm8k\.json, sample 3: .*'prediction'"),
    ],
)
def test_predictions_are_checked_like_all(work_dir, changes, named):
    with pytest.raises(DataError, match=named):
        edited(work_dir, "3", changes)


@pytest.mark.parametrize(("content", "named"), [('{"0": {"prediction": ""}, "2": {}}', "'1'"), ("[1]", "")])
def test_predictions_with_gaps_are_refused(work_dir, content, named):
    (work_dir / "predictions" / "model" / "gsm8k.json").write_text(content)
    with pytest.raises(DataError, match=rf"gsm8k\.json: .*{named}"):
        read_opencompass(work_dir)


def test_split_predictions_are_joined_in_numeric_order(work_dir):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    rows = list(json.loads(path.read_text()).values())
    path.unlink()
    for i in range(12):
        path.with_name(f"gsm8k_{i}.json").write_text(json.dumps({"0": rows[i]}))
    assert [p.gold for p in read_opencompass(work_dir)] == [str(i) for i in range(12)]


def test_missing_files_are_refused(work_dir, tmp_path):
    (work_dir / "predictions" / "model" / "gsm8k.json").unlink()
    with pytest.raises(DataError, match=r"gsm8k\.json"):
        read_opencompass(work_dir)
    with pytest.raises(DataError, match="elsewhere"):
        read_opencompass(tmp_path / "elsewhere")


def test_a_data_set_without_a_result_is_refused_instead_of_left_out(work_dir):
    """OpenCompass writes no results file where an evaluator fails."""
    predictions = work_dir / "predictions" / "model"
    text = (predictions / "gsm8k.json").read_text()
    (predictions / "math500.json").write_text(text)
    for number in range(11):
        (predictions / f"triviaqa_{number}.json").write_text(text)
    other = work_dir / "predictions" / "other" / "gsm8k.json"
    other.parent.mkdir()
    other.write_text(text)
    with pytest.raises(DataError, match="model/math500, model/triviaqa, other/gsm8k"):
        read_opencompass(work_dir)
    for path in (other, predictions / "math500.json", *predictions.glob("triviaqa_*")):
        path.unlink()
    assert len(read_opencompass(work_dir)) == 12
    (predictions / "tmp_aime24.json").write_text(text)  # what an inference that was stopped leaves
    with pytest.raises(DataError, match="model/aime24"):
        read_opencompass(work_dir)
    (predictions / "aime24.json").write_text(text)
    (work_dir / "results" / "model" / "aime24.json").write_text((work_dir / "results/model/gsm8k.json").read_text())
    assert len(read_opencompass(work_dir)) == 24  # the inference was gone on with, and is whole


def test_shards_are_their_data_sets_and_other_names_with_numbers_are_not(work_dir):
    predictions, results = (work_dir / folder / "model" for folder in ("predictions", "results"))
    text, verdicts = ((folder / "gsm8k.json").read_text() for folder in (predictions, results))
    # A data set of its own, whose name looks like a shard's; and one whose name begins like one.
    for name in ("gsm8k_2", "gsm8k_0_shot"):
        (predictions / f"{name}.json").write_text(text)
        (results / f"{name}.json").write_text(verdicts)
    assert {p.dataset for p in read_opencompass(work_dir)} == {"gsm8k", "gsm8k_2", "gsm8k_0_shot"}
    (results / "gsm8k_2.json").unlink()
    with pytest.raises(DataError, match="model/gsm8k_2"):
        read_opencompass(work_dir)
    # Whole and in shards, by two inferences: OpenCompass grades the whole.
    (predictions / "gsm8k_0.json").write_text(text)
    assert len(read_opencompass(work_dir)) == 24
    (predictions / "gsm8k.json").unlink()
    for number in (1, 2):
        (predictions / f"gsm8k_{number}.json").unlink(missing_ok=True)
    assert {p.dataset for p in read_opencompass(work_dir)} == {"gsm8k", "gsm8k_0_shot"}
    (predictions / "tmp_gsm8k_3.json").write_text(text)  # and one that is still being answered
    with pytest.raises(DataError, match="model/gsm8k"):
        read_opencompass(work_dir)


def test_a_shard_that_is_missing_is_refused(work_dir):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    text = path.read_text()
    path.unlink()
    for number in (0, 2):
        path.with_name(f"gsm8k_{number}.json").write_text(text)
    with pytest.raises(DataError, match=r"gsm8k_1\.json.*gsm8k_2"):
        read_opencompass(work_dir)
