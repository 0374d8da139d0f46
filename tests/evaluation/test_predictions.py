"""The predictions file: round trip, three keys suffice, and errors that name file and line."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, outcomes, read_predictions, write_predictions
from coca_mindspeed.evaluation.report import summary_metrics

ROW = {
    "id": "a",
    "dataset": "arithmetic",
    "question": "1+1",
    "response": "<confidence>0.90</confidence>2",
    "confidence": 0.9,
    "correct": True,
    "tokens_to_confidence": 10,
}


ROWS = [
    Prediction("a", "gsm8k", "q", "r", 0.3, True, 10),
    Prediction("a", "gsm8k", "q", "多行\nr", None, False, None, sample=1),
    Prediction("b", "gsm8k", "q", "r", 1.0, True, 9, "math", "coca", "qwen", 120, 0, "42", 7),
    Prediction("c", "gsm8k", "q", "r", 0.9, None, 12),
]


def test_round_trip(tmp_path):
    path = tmp_path / "p.jsonl"
    write_predictions(path, ROWS)
    assert read_predictions(path) == ROWS
    path.write_text(json.dumps(ROW | {"confidence": 1}) + "\n")
    rows = read_predictions(path)
    assert isinstance(rows[0].confidence, float)
    write_predictions(path, rows)
    assert json.loads(path.read_text()) == ROW | {"confidence": 1}  # seven keys are always written


def test_an_ungradable_answer_is_in_no_metric():
    assert [p.outcome for p in ROWS] == ["right", "wrong", "right", "ungradable"]
    data = outcomes(ROWS)
    assert (len(data), data.correct.tolist()) == (3, [True, False, True])
    np.testing.assert_equal([data.confidence, data.tokens_to_confidence], [[0.3, np.nan, 1.0], [10.0, np.nan, 9.0]])
    summary = summary_metrics(ROWS)
    assert (summary["n"], summary["ungradable"]) == (3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": 1.2}, r"p\.jsonl:1: field 'confidence' should be null or a number from 0 to 1, found 1\.2"),
        ({"confidence": float("nan")}, "'confidence'.* nan"),
        ({"confidence": "0.9"}, "found '0.9'"),
        ({"correct": 2}, "'correct'.* 2"),
        ({"correct": "yes"}, "'correct'.* 'yes'"),
        ({"tokens_to_confidence": -1}, "'tokens_to_confidence'"),
        ({"id": 3.5}, "'id'.* 3.5"),
        ({"sample": None}, "'sample'"),
        ({"seed": "0"}, "'seed'"),
        ({"categry": "math"}, "'categry'.*'category'"),
    ],
)
def test_bad_values_name_file_line_and_field(tmp_path, change, message):
    (tmp_path / "p.jsonl").write_text(json.dumps({**ROW, **change}))
    with pytest.raises(DataError, match=message):
        read_predictions(tmp_path / "p.jsonl")


THREE = [
    Prediction("1", "all", "", "", 0.9, True, None),
    Prediction("2", "all", "", "", None, False, None),
    Prediction("3", "all", "", "", 0.25, None, None, tokens=12),
]
CSV = "id,confidence,correct,tokens,note\n1,.9,True,,a\n2,,0,,\n3,2.5e-1,,12,x\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"id": 1, "confidence": 0.9, "correct": 1}\n{"id": "2", "confidence": null, "correct": false}\n'
         '{"id": "3", "confidence": 0.25, "correct": null, "tokens": 12, "model_name": "m"}\n'),
        ("p.json", '[{"id": 1, "confidence": 0.9, "correct": true}, {"id": 2, "confidence": null, "correct": 0},'
         '{"id": 3, "confidence": 0.25, "correct": null, "tokens": 12}]'),
        ("p.csv", CSV),
        ("p.tsv", CSV.replace(",", "\t")),
    ],
)  # fmt: skip
def test_id_confidence_and_correct_suffice(tmp_path, name, text, capsys):
    (tmp_path / name).write_text(text)
    assert read_predictions(tmp_path / name) == THREE
    assert ("note" in capsys.readouterr().err) == ("note" in text)


def test_parquet_as_pandas_writes_it(tmp_path):
    """Missing numbers make floats of a column, and NaN of the missing ones."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    columns = {
        "id": [1, 2, 3],
        "confidence": [0.9, math.nan, 0.25],
        "correct": [1.0, 0.0, math.nan],
        "tokens": [math.nan, math.nan, 12.0],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "p.parquet")
    assert read_predictions(tmp_path / "p.parquet") == THREE


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "decimal128(3, 2)"])
def test_parquet_confidences_lie_in_the_bins_of_their_decimals(tmp_path, kind):
    """Widened to a double, the float32 nearest to .3 would lie above the edge .3, and ECE would be .475."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    column = arrow.array([Decimal("0.30"), Decimal("0.25")]).cast(arrow.decimal128(3, 2))
    if kind.startswith("float"):
        column = arrow.array(np.array([0.3, 0.25], kind))
    table = arrow.table({"id": ["a", "b"], "confidence": column, "correct": [1, 0]})
    parquet.write_table(table, tmp_path / "p.parquet")
    predictions = read_predictions(tmp_path / "p.parquet")
    assert [p.confidence for p in predictions] == [0.3, 0.25]
    assert summary_metrics(predictions)["ece"] == pytest.approx(0.225)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        *((f"1,{value},1,", "confidence") for value in ("1_0e-1", "０.9", "90%", "²")),
        *((f"1,0.9,{value},", "correct") for value in ("right", "²", "9" * 5000)),
        *((f"1,0.9,1,{value}", "tokens") for value in ("²", "٣", "1_0", "9" * 5000)),
    ],
)
def test_bad_values_of_a_csv_name_file_row_and_field(tmp_path, row, field):
    (tmp_path / "p.csv").write_text(f"id,confidence,correct,tokens\n0,0.5,true,7\n{row}\n")
    with pytest.raises(DataError, match=rf"p\.csv:3: field '{field}'"):
        read_predictions(tmp_path / "p.csv")


def test_rows_without_an_id_are_numbered_only_where_asked(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("confidence,correct\n0.5,1\n0.5,1\n")
    assert [p.id for p in read_predictions(path, numbered=True)] == ["0", "1"]
    with pytest.raises(DataError, match=r"p\.csv:2: .*'id'"):
        read_predictions(path)
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 7, "confidence": 1, "correct": 1}\n{"confidence": 1, "correct": 1}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: .*'id'"):  # some have one
        read_predictions(path, numbered=True)


def test_missing_repeated_and_empty(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n" + json.dumps({k: v for k, v in ROW.items() if k != "correct"}))
    with pytest.raises(DataError, match=r"p\.jsonl:2: .*'correct'"):
        read_predictions(path)
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW)}")
    with pytest.raises(DataError, match=r"p\.jsonl:2: .*'a' of arithmetic, .*p\.jsonl:1"):
        read_predictions(path)
    path.write_text("")
    with pytest.raises(DataError, match="holds no predictions"):
        read_predictions(path)
