"""A real OpenCompass run over all eight data sets, against a served model whose true metrics are known."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_files import write_benchmarks
from served_model import ServedModels, save_tiny_tokenizer
from sklearn.metrics import brier_score_loss, roc_auc_score

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.evaluation.adapters import read_opencompass
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.opencompass import config as configuration
from coca_mindspeed.evaluation.predictions import outcomes

ROOT = Path(__file__).resolve().parents[3]
NAMES = tuple(configuration.STOCK)


def opencompass(work_dir, cache, *arguments):
    """Run the `opencompass` command line in this environment and return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COMPASS_DATA_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "opencompass.cli.main", *arguments, "-w", str(work_dir), "--debug"]
    done = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def one_task(config):
    """All data sets of a model in one process: importing OpenCompass takes longer than these data sets."""
    partitioner = {"type": "opencompass.partitioners.NaivePartitioner", "n": 100}
    return config | {
        stage: {
            "partitioner": dict(partitioner),
            "runner": {
                "type": "opencompass.runners.LocalRunner",
                "max_num_workers": 1,
                "task": {"type": f"opencompass.tasks.OpenICL{name}Task"},
            },
        }
        for stage, name in (("infer", "Infer"), ("eval", "Eval"))
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the crafted model over everything."""
    folder = tmp_path_factory.mktemp("opencompass")
    questions = write_benchmarks(folder)
    tokenizer_path = folder / "tokenizer"
    save_tiny_tokenizer(tokenizer_path)
    replies = {q.marker: q.reply for rows in questions.values() for q in rows}
    with ServedModels(replies) as served:
        common = {"api_base": served.url, "tokenizer_path": str(tokenizer_path)}
        judge = configuration.served_model("judge", name="judge", temperature=0.0, max_out_len=16, **common)
        crafted = configuration.served_model("crafted", name="crafted", **common)
        config = configuration.paper_config(crafted, judge=judge)
        path = folder / "run.json"
        path.write_text(json.dumps(one_task(config)))
        opencompass(folder / "out", folder, str(path))
        [work_dir] = (folder / "out").iterdir()
        yield work_dir, questions, list(served.requests)


def expected(questions):
    """Metrics of the crafted responses by other means than ours."""
    valid = [(float(q.stated), q.right) for q in questions if q.stated is not None]
    stated, right = [s for s, _ in valid], [y for _, y in valid]
    bins = {}
    for s, y in valid:
        hundredths = round(100 * s)
        bins.setdefault(max(0, -(-hundredths // 10) - 1), []).append((s, y))
    gaps = [abs(sum(s for s, _ in b) - sum(y for _, y in b)) for b in bins.values()]
    return {
        "accuracy": 100 * sum(q.right for q in questions) / len(questions),
        "auroc": roc_auc_score(right, stated),
        "ece": sum(gaps) / len(valid),
        "brier": brier_score_loss(right, stated),
        "success_rate": 100 * len(valid) / len(questions),
    }


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_those_of_the_crafted_responses(run, name):
    work_dir, questions, _ = run
    result = json.loads((work_dir / "results" / "crafted" / f"{name}.json").read_text())
    for metric, value in expected(questions[name]).items():
        assert result[metric] == pytest.approx(value, abs=1e-9), metric
    assert [row["correct"] for row in result["details"]] == [q.right for q in questions[name]]
    assert 4 < result["tokens_to_confidence"] < 40


def test_summary_prints_the_same_figures_to_the_digit(run):
    work_dir, questions, _ = run
    [path] = (work_dir / "summary").glob("*.csv")
    rows = {(row["dataset"], row["metric"]): row for row in csv.DictReader(path.open())}
    for name in NAMES:
        for metric, value in expected(questions[name]).items():
            assert rows[name, metric]["crafted"] == f"{value:.2f}"


def test_requests_have_the_papers_settings(run):
    _, questions, requests = run
    asked = [body for body in requests if body["model"] == "crafted"]
    assert len(asked) == sum(map(len, questions.values()))
    for body in asked:
        assert body["temperature"] == 1.0
        assert body["max_tokens"] == 4096
        assert [m["role"] for m in body["messages"]] == ["system", "user"]
        assert body["messages"][0]["content"] == SYSTEM_PROMPTS["first"]


def test_predictions_are_read_back(run):
    work_dir, questions, _ = run
    predictions = [p for p in read_opencompass(work_dir) if p.model == "crafted"]
    assert {p.dataset for p in predictions} == set(NAMES)
    for name in NAMES:
        rows = [p for p in predictions if p.dataset == name]
        assert [p.response for p in rows] == [q.reply for q in questions[name]]
        assert all(q.marker in p.question for p, q in zip(rows, questions[name], strict=True))
        arrays = outcomes(rows)
        values = calibration_metrics(arrays.confidence, arrays.correct).values
        assert values["ece"] == pytest.approx(expected(questions[name])["ece"])
        assert all(p.tokens_to_confidence is None or p.tokens_to_confidence > 4 for p in rows)
