"""OpenCompass's output, in each of the shapes that it comes in."""

import json
from contextlib import nullcontext

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
    predictions = read_opencompass(work_dir)
    assert [p.id for p in predictions] == [str(i) for i in range(12)]
    assert [p.confidence for p in predictions[:3]] == [0.0, 0.1, 0.2]
    assert predictions[3].correct is False
    assert (predictions[3].question, predictions[3].gold) == ("question 3", "3")
    assert predictions[3].model == "model"


def edited(work_dir, number, changes):
    path = work_dir / "predictions" / "model" / "gsm8k.json"
    rows = json.loads(path.read_text())
    rows[number] |= changes
    path.write_text(json.dumps({n: {k: v for k, v in row.items() if v != "removed"} for n, row in rows.items() if row}))
    return read_opencompass(work_dir)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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


SHARDS = [f"model/triviaqa_{number}" for number in range(11)]
WHOLE = ["model/gsm8k"]


@pytest.mark.parametrize(
    ("predictions", "results", "refused"),
    [
        ([], WHOLE, r"gsm8k\.json"),
        (WHOLE, [], "results/MODEL/DATASET"),
        # OpenCompass writes no results file where an evaluator fails.
        ([*WHOLE, "model/math500", *SHARDS, "other/gsm8k"], WHOLE, "model/math500, model/triviaqa, other/gsm8k"),
        ([*WHOLE, "model/tmp_aime24"], WHOLE, "model/aime24"),  # left by an inference that was stopped
        ([*WHOLE, "model/tmp_aime24", "model/aime24"], [*WHOLE, "model/aime24"], None),  # continued to its end
        # Data sets with names like those of shards.
        ([*WHOLE, "model/gsm8k_2", "model/gsm8k_0_shot"], [*WHOLE, "model/gsm8k_2", "model/gsm8k_0_shot"], None),
        ([*WHOLE, "model/gsm8k_2"], WHOLE, "model/gsm8k_2"),
        ([*WHOLE, "model/gsm8k_0"], WHOLE, None),  # whole and in shards, by two inferences: the whole is graded
        (["model/gsm8k_0", "model/tmp_gsm8k_1"], WHOLE, "model/gsm8k"),
        (["model/gsm8k_0", "model/gsm8k_2"], WHOLE, r"gsm8k_1\.json"),
    ],
)
def test_files_of_a_run(work_dir, predictions, results, refused):
    for folder, names in (("predictions", predictions), ("results", results)):
        text = (work_dir / folder / "model" / "gsm8k.json").read_text()
        (work_dir / folder / "model" / "gsm8k.json").unlink()
        for name in names:
            path = work_dir / folder / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    with pytest.raises(DataError, match=refused) if refused else nullcontext():
        assert {f"model/{p.dataset}" for p in read_opencompass(work_dir)} == set(results)
