"""Metrics that others published of their own predictions, by ``evaluate``: RLCR's, five methods on three data sets."""

import gzip
import json

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from tests.shared_data import shared_data

pytestmark = pytest.mark.published
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def published():
    return json.loads(shared_data("rlcr_published_metrics.json").read_text())


@pytest.fixture(scope="module")
def predictions():
    with gzip.open(shared_data("rlcr_predictions.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Prediction(str(r["row"]), r["dataset"], "q", "r", r["confidence"], bool(r["correct"]), None, method=r["method"])
        for r in rows
    ]


def test_every_published_figure(published, predictions, tmp_path, capsys):
    write_predictions(tmp_path / "rlcr.jsonl", predictions)
    arguments = [str(tmp_path / "rlcr.jsonl"), "--output", str(tmp_path), "--bins-closed", "left"]
    assert main(["evaluate", *arguments]) == 0
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["bins_closed"] == "left"
    assert "closed on the left" in capsys.readouterr().out
    names = {"accuracy": "accuracy", "brier": "brier_score", "ece": "ece", "auroc": "auroc"}
    cells = 0
    for dataset, methods in published.items():
        for method, figures in methods.items():
            ours = found["results"][method][dataset]["metrics"]
            values = {name: ours[name]["estimate"] for name in names}
            assert values == pytest.approx({name: figures[of] for name, of in names.items()}, abs=TOLERANCE)
            cells += 1
    assert cells == 15
